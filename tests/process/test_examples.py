"""The examples as a user runs them: the models under a server, the clients as commands."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.photos import BAD_IMAGES, ONE_LEVEL, PHOTO, PHOTOS, reference
from tests.process.server import running_server

EXAMPLES = Path(__file__).parents[2] / "examples"
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the models need torch"
)


@pytest.fixture(scope="module")
def server():
    repositories = [EXAMPLES / "image_preproc" / "model_repository"]
    if importlib.util.find_spec("torch"):
        repositories.append(EXAMPLES / "pytorch_addsub" / "model_repository")
        repositories.append(EXAMPLES / "image_preproc" / "pipeline_repository")
    with running_server(repositories) as running:
        yield running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.http_url) as client:
        yield client


def run_example(script, server, *arguments):
    """Run an example as its README says; return what it printed."""
    command = [sys.executable, str(EXAMPLES / script), "--url", server.http_url, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def ask(client, *jpegs):
    images = np.empty((len(jpegs), 1), np.object_)
    images[:, 0] = jpegs
    tensor = triton.InferInput("IMAGE", list(images.shape), "BYTES")
    tensor.set_data_from_numpy(images)
    return client.infer("image_preproc", [tensor]).as_numpy("PIXELS")


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


def test_image_preproc_answers_what_a_vision_library_would(client):
    jpegs = [photo.read_bytes() for photo in PHOTOS]
    expected = np.stack([reference(jpeg) for jpeg in jpegs])
    np.testing.assert_allclose(ask(client, *jpegs), expected, atol=ONE_LEVEL, rtol=0)


def test_image_preproc_writes_its_pixels_where_they_are_sent_from(server, client):
    copied = 'gpubridge_copied_bytes_total{kind="host",model="image_preproc",version="1"}'
    ask(client, PHOTO)
    before = server.metrics()[copied]
    pixels = ask(client, PHOTO)
    # At the most what comes of the photograph in one read with the request's head.
    assert server.metrics()[copied] - before < pixels.nbytes / 10


@pytest.mark.parametrize(("jpeg", "message"), BAD_IMAGES)
def test_image_preproc_names_the_bad_image_to_its_client(client, jpeg, message):
    with pytest.raises(InferenceServerException, match=rf"IMAGE\[1\]: .*{message}") as refused:
        ask(client, PHOTO, jpeg)
    assert refused.value.status() == "400"


def test_good_requests_are_answered_while_bad_ones_are_refused(server):
    def one_connection(number):
        with triton.InferenceServerClient(server.http_url) as own:
            for _ in range(3):
                if number % 2:
                    with pytest.raises(InferenceServerException, match=r"IMAGE\[0\]"):
                        ask(own, PHOTO[:5000])
                else:
                    assert ask(own, PHOTO).shape == (1, 3, 224, 224)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one_connection, range(4)))


def test_demo_shows_models_speeds_an_error_and_a_picture(server, tmp_path):
    printed = run_example("demo.py", server, "--output", str(tmp_path / "shown"))
    assert "IMAGE BYTES [-1, 1] -> PIXELS FP32 [-1, 3, 224, 224]" in printed
    speeds = [line.split()[:2] for line in printed.splitlines() if line.startswith(("py", "im"))]
    assert ["image_preproc", "4"] in speeds
    # It leaves out the examples that are not served.
    assert (["pytorch_addsub", "16"] in speeds) == bool(importlib.util.find_spec("torch"))
    assert "text of pictures" not in printed
    assert "IMAGE[1]: expected a whole JPEG file" in printed
    with Image.open(tmp_path / "shown" / "contact_sheet.png") as drawn:
        assert drawn.format == "PNG"
