"""The examples as a user runs them: the models under a server, the clients as commands; pictures to labels."""

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.photos import BAD_IMAGES, ONE_LEVEL, PHOTO, PHOTOS, reference
from tests.process.forked_commands import SCRIPT_IMPORTS, run_forked, run_script
from tests.process.server import running_server

EXAMPLES = Path(__file__).parents[2] / "examples"
LABELS = EXAMPLES / "image_preproc" / "pipeline_repository" / "classifier" / "labels.txt"
LABELS = LABELS.read_text().split()
SEED = 20
PIPELINES = ["photo_labels", "photo_labels_bls"]
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the models need torch"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repositories = ["image_preproc/model_repository"]
    if importlib.util.find_spec("torch"):
        repositories += ["pytorch_addsub/model_repository", "image_preproc/pipeline_repository"]
    together = tmp_path_factory.mktemp("models")
    for repository in repositories:
        for model in (EXAMPLES / repository).iterdir():
            (together / model.name).symlink_to(model)
    with running_server(together) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.http_url) as client:
        yield client


def run_example(script, server, *arguments):
    """Run an example as its README says; return what it printed."""
    finished = run_script(str(EXAMPLES / script), "--url", server.http_url, *arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def infer(client, model, *jpegs, library=triton):
    images = np.empty((len(jpegs), 1), np.object_)
    images[:, 0] = jpegs
    tensor = library.InferInput("IMAGE", list(images.shape), "BYTES").set_data_from_numpy(images)
    return client.infer(model, [tensor])


def ask(server, *jpegs):
    with triton.InferenceServerClient(server.http_url) as client:
        return infer(client, "image_preproc", *jpegs).as_numpy("PIXELS")


@needs_torch
def test_pytorch_addsub_client_gets_the_sum_and_the_difference(server):
    printed = run_example("pytorch_addsub/client.py", server, "--requests=32", "--connections=4")
    assert "sum    [11. 22. 33. 44.]" in printed
    assert "diff   [ -9. -18. -27. -36.]" in printed
    assert "32 requests over 4 connection(s), every answer checked" in printed


def test_image_preproc_client_shows_every_photograph(server, tmp_path):
    sheet = tmp_path / "sheet.png"
    printed = run_example("image_preproc/client.py", server, "--contact-sheet", str(sheet))
    for photo in PHOTOS:
        assert f"{photo.name:28} [3, 224, 224] float32" in printed
    assert f"all in one request: [{len(PHOTOS)}, 3, 224, 224] float32" in printed
    with Image.open(sheet) as drawn:
        assert drawn.format == "PNG"
        assert len(drawn.convert("RGB").getcolors(1 << 24)) > 10_000  # photographs, not a blank


def test_image_preproc_answers_what_a_vision_library_would(server):
    jpegs = [photo.read_bytes() for photo in PHOTOS]
    expected = np.stack([reference(jpeg) for jpeg in jpegs])
    np.testing.assert_allclose(ask(server, *jpegs), expected, atol=ONE_LEVEL, rtol=0)


def test_image_preproc_writes_its_pixels_where_they_are_sent_from(server):
    ask(server, PHOTO)
    before = server.copied("image_preproc")
    pixels = ask(server, PHOTO)
    # At the most what comes of the photograph in one read with the request's head.
    assert server.copied("image_preproc") - before < pixels.nbytes / 10


@pytest.mark.parametrize(("jpeg", "message"), BAD_IMAGES)
def test_image_preproc_names_the_bad_image_to_its_client(server, jpeg, message):
    with pytest.raises(InferenceServerException, match=rf"IMAGE\[1\]: .*{message}") as refused:
        ask(server, PHOTO, jpeg)
    assert refused.value.status() == "400"


def test_good_requests_are_answered_while_bad_ones_are_refused(server):
    def one_connection(number):
        for _ in range(3):
            if number % 2:
                with pytest.raises(InferenceServerException, match=r"IMAGE\[0\]"):
                    ask(server, PHOTO[:5000])
            else:
                assert ask(server, PHOTO).shape == (1, 3, 224, 224)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one_connection, range(4)))


# With a few requests in place of a thousand.
DEMO = """
sys.path.insert(0, sys.argv.pop(1))
import demo
demo.ADD_SUB_REQUESTS, demo.PHOTO_ROUNDS = 32, 1
sys.exit(demo.main())
"""


def test_demo_shows_models_speeds_an_error_and_a_picture(server, tmp_path):
    words = (str(EXAMPLES), "--url", server.http_url, "--output", str(tmp_path / "shown"))
    finished = run_forked(*words, imports=SCRIPT_IMPORTS, program=DEMO)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    printed = finished.stdout
    assert "IMAGE BYTES [-1, 1] -> PIXELS FP32 [-1, 3, 224, 224]" in printed
    speeds = [line.split()[:2] for line in printed.splitlines() if line.startswith(("py", "im"))]
    assert ["image_preproc", "4"] in speeds
    # It leaves out the examples that are not served.
    assert (["pytorch_addsub", "16"] in speeds) == bool(importlib.util.find_spec("torch"))
    assert "text of pictures" not in printed
    assert "IMAGE[1]: expected a whole JPEG file" in printed
    with Image.open(tmp_path / "shown" / "contact_sheet.png") as drawn:
        assert drawn.format == "PNG"


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


def labels(client, model, *jpegs, library=triton):
    answer = infer(client, model, *jpegs, library=library)
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


@needs_torch
def test_photographs_get_the_labels_that_the_network_gives_them(server, client, expected):
    jpegs = [photo.read_bytes() for photo in PHOTOS]
    for model in PIPELINES:
        names, probabilities = labels(client, model, *jpegs)
        check(names, probabilities, expected)
        assert len(set(names[:, 0])) > 2  # or the network would see nothing
    with over_grpc.InferenceServerClient(server.grpc_url) as grpc:
        check(*labels(grpc, "photo_labels", *jpegs[:3], library=over_grpc), expected[:3])


@needs_torch
def test_clients_at_the_same_time_get_their_own_labels(server, expected):
    def one(index):
        with triton.InferenceServerClient(server.http_url) as own:
            for turn in range(2):
                at = (index + turn) % len(PHOTOS)
                model = PIPELINES[(index + turn) % 2]
                check(*labels(own, model, PHOTOS[at].read_bytes()), expected[[at]])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(4)))


@needs_torch
def test_the_pixels_are_not_copied_between_the_models(server, client):
    def copied():
        return sum(map(server.copied, ("image_preproc", "classifier", "top_labels")))

    jpegs = [photo.read_bytes() for photo in PHOTOS]
    for model in PIPELINES:
        for _ in range(16):
            # Until it is clear that the called model only reads what its caller has, too.
            labels(client, model, PHOTO)
        before = copied()
        labels(client, model, *jpegs)
        # Probabilities and labels are; a tensor of pixels has 600 KB an image.
        assert copied() - before < 1000 * len(jpegs)


@needs_torch
def test_a_bad_photograph_is_named_and_harms_nobody(client, expected):
    for model in PIPELINES:
        with pytest.raises(InferenceServerException, match=r"IMAGE\[1\]: expected a whole JPEG"):
            labels(client, model, PHOTO, PHOTO[: len(PHOTO) // 2])
        check(*labels(client, model, PHOTOS[0].read_bytes()), expected[:1])


@needs_torch
def test_the_classification_extension_names_the_same_classes(server, client):
    module = importlib.util.spec_from_file_location(
        "classify", EXAMPLES / "image_preproc" / "classify.py"
    )
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


@needs_torch
def test_the_client_shows_every_photograph(server):
    printed = run_example("image_preproc/classify.py", server)
    for photo in PHOTOS:
        assert f"{photo.name:28} " in printed
    assert printed.endswith("photo_labels_bls says the same\n")


@needs_torch
def test_the_statistics_know_of_every_step(server, client):
    names = ["image_preproc", "classifier", "top_labels", "photo_labels"]

    def counts():
        found = client.get_inference_statistics()["model_stats"]
        return {entry["name"]: int(entry["inference_count"]) for entry in found}

    before = counts()
    labels(client, "photo_labels", PHOTO, PHOTO)
    after = counts()
    assert {name: after[name] - before[name] for name in names} == dict.fromkeys(names, 2)
    status, _, page = server.request("GET", "/v2/models/photo_labels")
    assert status == 200
    assert [tensor["name"] for tensor in json.loads(page)["outputs"]] == ["LABELS", "PROBABILITIES"]
