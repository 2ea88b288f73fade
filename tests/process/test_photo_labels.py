"""The pipeline of examples/image_preproc: photographs to labels through three models."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.photos import PHOTO, PHOTOS, reference
from tests.process.server import running_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_preproc"
PIPELINE = EXAMPLE / "pipeline_repository"
LABELS = (PIPELINE / "classifier" / "labels.txt").read_text().split()
SEED = 20
NAMES = ["photo_labels", "photo_labels_bls"]

if importlib.util.find_spec("torch") is None:
    pytest.skip("the classifier needs torch", allow_module_level=True)


@pytest.fixture(scope="module")
def server():
    with running_server([EXAMPLE / "model_repository", PIPELINE]) as running:
        yield running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.http_url) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """The probabilities of every photograph, by Pillow and NumPy alone."""
    pixels = np.stack([reference(photo.read_bytes()) for photo in PHOTOS])
    return network(pixels)


def network(pixels):
    """The network without PyTorch: `[images, 3, 224, 224]` to `[images, 16]`."""
    random = np.random.RandomState(SEED)

    def weights(*shape):
        drawn = random.standard_normal(shape) * (2 / np.prod(shape[1:])) ** 0.5
        random.standard_normal(shape[0])  # the biases are drawn too, and are zero
        return drawn.astype(np.float32)

    layers = [weights(16, 3, 5, 5), weights(32, 16, 3, 3), weights(64, 32, 3, 3)]
    head = weights(16, 64)
    values = pixels
    for index, (kernel, stride) in enumerate(zip(layers, (4, 2, 2), strict=True)):
        values = np.maximum(values, 0) if index else values
        windows = np.lib.stride_tricks.sliding_window_view(values, kernel.shape[2:], (2, 3))
        windows = windows[:, :, ::stride, ::stride]
        values = np.einsum("nihwyx,oiyx->nohw", windows, kernel, optimize=True)
    features = values.mean((2, 3))
    features -= features.mean(1, keepdims=True)
    features /= np.sqrt((features**2).mean(1, keepdims=True) + 1e-5)
    shares = np.exp(features @ head.T)
    return shares / shares.sum(1, keepdims=True)


def ask(client, model, *jpegs, library=triton):
    images = np.empty((len(jpegs), 1), np.object_)
    images[:, 0] = jpegs
    tensor = library.InferInput("IMAGE", list(images.shape), "BYTES")
    tensor.set_data_from_numpy(images)
    answer = client.infer(model, [tensor])
    names = np.array([[name.decode() for name in row] for row in answer.as_numpy("LABELS")])
    return names, answer.as_numpy("PROBABILITIES")


def check(names, probabilities, expected):
    """Compare with the probabilities of the reference; what is as likely may change places."""
    assert names.shape == probabilities.shape == (len(expected), 3)
    best = -np.sort(-expected, axis=1)[:, :3]
    np.testing.assert_allclose(probabilities, best, atol=2e-3, rtol=0)
    of_names = np.take_along_axis(expected, np.vectorize(LABELS.index)(names), axis=1)
    np.testing.assert_allclose(of_names, best, atol=2e-3, rtol=0)
    assert all(len(set(row)) == 3 for row in names.tolist())


@pytest.mark.parametrize("model", NAMES)
def test_photographs_get_the_labels_that_the_network_gives_them(client, expected, model):
    names, probabilities = ask(client, model, *(photo.read_bytes() for photo in PHOTOS))
    check(names, probabilities, expected)
    assert len(set(names[:, 0])) > 2  # or the network would see nothing


def test_over_grpc_too(server, expected):
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        jpegs = [photo.read_bytes() for photo in PHOTOS[:3]]
        check(*ask(client, "photo_labels", *jpegs, library=over_grpc), expected[:3])


def test_clients_at_the_same_time_get_their_own_labels(server, expected):
    def one(index):
        with triton.InferenceServerClient(server.http_url) as own:
            for turn in range(3):
                at = (index + turn) % len(PHOTOS)
                model = NAMES[(index + turn) % 2]
                check(*ask(own, model, PHOTOS[at].read_bytes()), expected[[at]])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(8)))


def test_the_pixels_are_not_copied_between_the_models(server, client):
    def copied():
        page = server.metrics()
        return sum(
            page[f'gpubridge_copied_bytes_total{{kind="host",model="{name}",version="1"}}']
            for name in ("image_preproc", "classifier", "top_labels")
        )

    jpegs = [photo.read_bytes() for photo in PHOTOS]
    for model in NAMES:
        for _ in range(16):
            # Until it is clear that the called model only reads what its caller has, too.
            ask(client, model, PHOTO)
        before = copied()
        ask(client, model, *jpegs)
        # Probabilities and labels are; a tensor of pixels has 600 KB an image.
        assert copied() - before < 1000 * len(jpegs)


@pytest.mark.parametrize("model", NAMES)
def test_a_bad_photograph_is_named_and_harms_nobody(client, expected, model):
    with pytest.raises(InferenceServerException, match=r"IMAGE\[1\]: expected a whole JPEG"):
        ask(client, model, PHOTO, PHOTO[: len(PHOTO) // 2])
    check(*ask(client, model, PHOTOS[0].read_bytes()), expected[:1])


def test_the_classification_extension_names_the_same_classes(server, client):
    module = importlib.util.spec_from_file_location("classify", EXAMPLE / "classify.py")
    classify = importlib.util.module_from_spec(module)
    module.loader.exec_module(classify)
    jpegs = [photo.read_bytes() for photo in PHOTOS[:2]]
    pixels = client.infer("image_preproc", [classify.image_input(jpegs)]).as_numpy("PIXELS")
    for texts, guesses in zip(
        classify.classify_by_extension(client, pixels, 3),
        classify.classify(client, jpegs),
        strict=True,
    ):
        for text, (label, probability) in zip(texts, guesses, strict=True):
            share, index, name = text.split(":")
            assert (name, LABELS[int(index)]) == (label, label)
            assert float(share) == pytest.approx(probability, abs=1e-4)


def test_the_client_shows_every_photograph(server):
    command = [sys.executable, str(EXAMPLE / "classify.py"), "--url", server.http_url]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for photo in PHOTOS:
        assert f"{photo.name:28} " in finished.stdout
    assert finished.stdout.endswith("photo_labels_bls says the same\n")


def test_the_statistics_know_of_every_step(server, client):
    names = ["image_preproc", "classifier", "top_labels", "photo_labels"]

    def counts():
        found = client.get_inference_statistics()["model_stats"]
        return {entry["name"]: int(entry["inference_count"]) for entry in found}

    before = counts()
    ask(client, "photo_labels", PHOTO, PHOTO)
    after = counts()
    assert {name: after[name] - before[name] for name in names} == dict.fromkeys(names, 2)
    status, _, page = server.request("GET", "/v2/models/photo_labels")
    assert status == 200
    assert [tensor["name"] for tensor in json.loads(page)["outputs"]] == ["LABELS", "PROBABILITIES"]
