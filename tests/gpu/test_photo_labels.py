"""The pipeline of examples/image_preproc with PyTorch on the GPU: pixels stay there between models."""

import importlib.util
from pathlib import Path

import pytest
import tritonclient.http as triton

from tests.gpu.lane import needs_library, running_lane_server
from tests.photos import PHOTOS

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_preproc"
SCORES = 16 * 4  # bytes of an image's probabilities
NAMES = ["photo_labels", "photo_labels_bls"]

pytestmark = pytest.mark.real_gpu


@pytest.fixture(scope="module")
def served(machine):
    needs_library("torch")
    if importlib.util.find_spec("PIL") is None:
        pytest.skip("image_preproc needs pillow")
    repositories = [EXAMPLE / "model_repository", EXAMPLE / "pipeline_repository"]
    with running_lane_server(machine, repositories, arena=256 << 20) as served:
        yield served


@pytest.fixture(scope="module")
def classify():
    found = importlib.util.spec_from_file_location("classify", EXAMPLE / "classify.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def client(served):
    with triton.InferenceServerClient(served.server.http_url) as client:
        yield client


def work(served, model):
    found = served.work(model)
    return {kind: found[kind, "copied_bytes"] for kind in ("h2d", "d2h", "d2d")}


@pytest.mark.parametrize("model", NAMES)
def test_labels_are_those_of_the_cpu(client, classify, model):
    """The same network in this process, on the same pixels."""
    import torch

    spec = importlib.util.spec_from_file_location(
        "classifier", EXAMPLE / "pipeline_repository" / "classifier" / "1" / "model.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    jpegs = [photo.read_bytes() for photo in PHOTOS]
    pixels = client.infer("image_preproc", [classify.image_input(jpegs)]).as_numpy("PIXELS")
    with torch.inference_mode():
        scores = module.Network(20).eval()(torch.from_numpy(pixels.copy())).numpy()
    for guesses, expected in zip(classify.classify(client, jpegs, model), scores, strict=True):
        best = sorted(expected.tolist(), reverse=True)[:3]
        # Convolutions in TF32 have ten bits.
        assert [share for _, share in guesses] == pytest.approx(best, abs=1e-2)


@pytest.mark.parametrize("model", NAMES)
def test_no_pixels_cross_between_decoder_and_classifier(served, client, classify, model):
    """Only probabilities come back to the host; the bridge moves no pixels."""
    jpegs = [photo.read_bytes() for photo in PHOTOS]
    classify.classify(client, jpegs, model)
    names = ("image_preproc", "classifier", "top_labels", model)
    before = {name: work(served, name) for name in names}
    for _ in range(3):
        classify.classify(client, jpegs, model)
    spent = {
        name: {kind: after - before[name][kind] for kind, after in work(served, name).items()}
        for name in names
    }
    # What goes to the GPU before it is decoded is image_preproc's own affair.
    assert spent.pop("image_preproc")["d2h"] == 0, spent
    assert sum(moved["h2d"] for moved in spent.values()) == 0, spent
    assert sum(moved["d2h"] for moved in spent.values()) == 3 * len(jpegs) * SCORES, spent
