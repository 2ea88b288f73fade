"""The examples as a user runs them: the models under a server, the clients as commands.

The first half needs no server: it drives image_preproc's modules with a stand-in for the
``triton_python_backend_utils`` of a stub.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import struct
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image, ImageOps
from tritonclient.utils import InferenceServerException

from tests.process.server import running_server

EXAMPLES = Path(__file__).parents[2] / "examples"
PHOTOS = sorted((EXAMPLES / "image_preproc" / "images").glob("*.jpg"))
MODULES = ("model", "jpeg_decoding", "normalization", "resizing", "settings")
PARAMETERS = {
    "RESIZE_SHORTER_SIDE": "256",
    "NORMALIZE_MEAN": "0.485, 0.456, 0.406",
    "NORMALIZE_STD": "0.229, 0.224, 0.225",
    "MAX_PIXELS": "50000000",
    "DECODER": "pillow",
    "THREADS": "2",
}
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="pytorch_addsub needs torch"
)


def reference(jpeg):
    """What a vision library makes of a photograph: resize all of it, crop, normalise."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).convert("RGB")
    shorter = min(image.size)
    width, height = (256 * side // shorter for side in image.size)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(resized.crop((left, top, left + 224, top + 224))) / 255
    return ((pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).transpose(2, 0, 1)


ONE_LEVEL = 1 / 255 / 0.224 + 1e-5  # the widest that one 8-bit step is after normalising


def as_jpeg(image, **options):
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", **options)
    return encoded.getvalue()


def claiming(jpeg, width, height):
    """The same file with another size in its frame header: a decompression bomb."""
    patched = bytearray(jpeg)
    size_at = patched.index(b"\xff\xc0") + 5
    patched[size_at : size_at + 4] = struct.pack(">HH", height, width)
    return bytes(patched)


PHOTO = (EXAMPLES / "image_preproc" / "images" / "rocket.jpg").read_bytes()
BAD_IMAGES = [
    pytest.param(b"", "expected a JPEG file .* got 0 bytes", id="empty"),
    pytest.param(b"\x89PNG\r\n\x1a\n", "got 8 bytes starting 89 50 4E 47", id="not a jpeg"),
    pytest.param(PHOTO[:100], "got 100 bytes that are truncated or damaged", id="header only"),
    pytest.param(PHOTO[: len(PHOTO) // 2], "truncated or damaged", id="truncated"),
    pytest.param(
        claiming(PHOTO, 65000, 65000),
        "at most 50000000 pixels, got 65000 x 65000 = 4225000000",
        id="decompression bomb",
    ),
]


class FakeTensor:
    def __init__(self, name, array):
        self.name, self.array = name, array

    def as_numpy(self):
        return self.array


class FakeError(Exception):
    INVALID_ARG = 3

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


@pytest.fixture
def preprocessing(monkeypatch):
    """image_preproc's modules by name, imported as a stub would, and forgotten afterwards."""
    backend_utils = types.SimpleNamespace(
        Tensor=FakeTensor,
        TritonError=FakeError,
        Logger=types.SimpleNamespace(log_info=lambda message: None),
        InferenceResponse=lambda output_tensors, error=None: types.SimpleNamespace(
            outputs=output_tensors, error=error
        ),
        get_input_tensor_by_name=lambda request, name: request[name],
    )
    version_directory = EXAMPLES / "image_preproc/model_repository/image_preproc/1"
    monkeypatch.syspath_prepend(str(version_directory))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend_utils)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def model_config(**changes):
    parameters = {**PARAMETERS, **changes}
    return json.dumps(
        {
            "output": [{"name": "PIXELS", "dims": ["3", "224", "224"]}],
            "parameters": {
                key: {"string_value": value} for key, value in parameters.items() if value
            },
        }
    )


@pytest.fixture(params=["pillow", "nvimagecodec"])
def decoder(request, preprocessing):
    if request.param == "nvimagecodec":
        pytest.importorskip("nvidia.nvimgcodec")
    return preprocessing.jpeg_decoding.make_decoder(request.param, max_pixels=50_000_000)


@pytest.fixture
def model(preprocessing):
    model = preprocessing.model.TritonPythonModel()
    model.initialize({"model_config": model_config(), "model_instance_name": "image_preproc_0_0"})
    yield model
    model.finalize()


def request_of(*jpegs):
    images = np.empty((len(jpegs), 1), np.object_)
    images[:, 0] = jpegs
    return {"IMAGE": FakeTensor("IMAGE", images)}


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: photo.stem)
def test_both_decoders_give_pillow_pixels_upright_and_in_rgb(decoder, photo):
    expected = ImageOps.exif_transpose(Image.open(photo)).convert("RGB")
    decoded = decoder.decode(photo.read_bytes())
    assert decoded.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(expected))


@pytest.mark.parametrize(("jpeg", "message"), BAD_IMAGES)
def test_both_decoders_say_what_is_wrong_with_an_image(decoder, preprocessing, jpeg, message):
    with pytest.raises(preprocessing.jpeg_decoding.ImageError, match=message):
        decoder.decode(jpeg)


def test_an_image_at_the_pixel_limit_is_taken_and_one_above_it_is_not(preprocessing):
    jpeg = as_jpeg(Image.new("RGB", (40, 25)))
    decode = preprocessing.jpeg_decoding
    assert decode.PillowDecoder(max_pixels=1000).decode(jpeg).size == (40, 25)
    with pytest.raises(decode.ImageError, match="at most 999 pixels, got 40 x 25 = 1000"):
        decode.PillowDecoder(max_pixels=999).decode(jpeg)


@pytest.mark.parametrize("size", [(640, 427), (427, 640), (257, 1999), (224, 224), (50, 40)])
def test_cropping_while_resizing_equals_cropping_afterwards(preprocessing, size):
    noise = np.random.default_rng(7).integers(0, 256, (size[1], size[0], 3), np.uint8)
    jpeg = as_jpeg(Image.fromarray(noise), quality=95)
    cropped = preprocessing.resizing.resize_and_crop(Image.open(io.BytesIO(jpeg)), 256, 224, 224)
    pixels = np.empty((3, 224, 224), np.float32)
    preprocessing.normalization.Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)).write(
        cropped, pixels
    )
    np.testing.assert_allclose(pixels, reference(jpeg), atol=ONE_LEVEL, rtol=0)


def test_a_bad_image_fails_its_own_request_and_no_other(model):
    responses = model.execute(
        [request_of(PHOTO, PHOTO), request_of(PHOTO, b"no", PHOTO, PHOTO[:50]), request_of(PHOTO)]
    )
    assert [response.error is None for response in responses] == [True, False, True]
    assert [response.outputs[0].array.shape[0] for response in responses[::2]] == [2, 1]
    error = responses[1].error
    assert error.code == FakeError.INVALID_ARG
    assert [line.split(":")[0] for line in str(error).splitlines()] == ["IMAGE[1]", "IMAGE[3]"]
    assert responses[1].outputs == []


def test_a_bug_of_the_model_is_not_blamed_on_the_image(model, monkeypatch):
    def broken(image, planes):
        raise ZeroDivisionError

    monkeypatch.setattr(model.normalization, "write", broken)
    with pytest.raises(ZeroDivisionError):
        model.execute([request_of(PHOTO)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RESIZE_SHORTER_SIDE": "200"}, "RESIZE_SHORTER_SIDE: expected at least 224.* got 200"),
        ({"MAX_PIXELS": "-1"}, "MAX_PIXELS: expected a whole number above 0, got '-1'"),
        ({"THREADS": ""}, "THREADS: expected in config.pbtxt, got none"),
        ({"NORMALIZE_MEAN": "0.5"}, "NORMALIZE_MEAN: expected three numbers"),
        ({"NORMALIZE_STD": "0, 1, 1"}, "NORMALIZE_STD: expected numbers above 0"),
        ({"DECODER": "magic"}, "DECODER: expected one of auto, nvimagecodec, pillow, got magic"),
    ],
)
def test_a_wrong_parameter_is_named_when_the_model_loads(preprocessing, change, message):
    with pytest.raises(ValueError, match=message):
        preprocessing.settings.Settings.from_model_config(model_config(**change))


@pytest.fixture(scope="module")
def server():
    repositories = [EXAMPLES / "image_preproc" / "model_repository"]
    if importlib.util.find_spec("torch"):
        repositories.append(EXAMPLES / "pytorch_addsub" / "model_repository")
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
    images = request_of(*jpegs)["IMAGE"].array
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


@needs_torch
def test_demo_shows_models_speeds_an_error_and_a_picture(server, tmp_path):
    printed = run_example("demo.py", server, "--output", str(tmp_path / "shown"))
    assert "input  IMAGE BYTES [-1, 1]" in printed
    assert "output OUTPUT1 FP32 [4]" in printed
    speeds = [line.split()[:2] for line in printed.splitlines() if line.startswith(("py", "im"))]
    assert ["pytorch_addsub", "16"] in speeds
    assert ["image_preproc", "4"] in speeds
    assert "IMAGE[1]: expected a whole JPEG file" in printed
    with Image.open(tmp_path / "shown" / "contact_sheet.png") as drawn:
        assert drawn.format == "PNG"
