"""The backend image_preproc: its pixels, its parameters, and what it says of bad images."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from PIL import Image, ImageOps

from gpubridge.backends.image_preproc.host_path import ImageError, PillowDecoder, make_decoder
from gpubridge.backends.image_preproc.model import TritonPythonModel
from gpubridge.backends.image_preproc.resizing import resize_on_host
from tests.image_settings import image_settings
from tests.photos import BAD_IMAGES, PHOTO, PHOTOS, as_jpeg
from tests.unit.backend_models import complete, outputs, request, start_model

CONFIG = """
backend: "image_preproc"
max_batch_size: 8
input { name: "JPEG" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "PIXELS" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }
"""


def parameters(**values):
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in values.items()
    )


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start models by their configuration; they end with the test."""
    started = []

    def start(config=CONFIG):
        started.append(start_model(monkeypatch, TritonPythonModel, tmp_path / "m", config))
        return started[-1]

    yield start
    for model in started:
        model.finalize()


@pytest.fixture(params=["pillow", pytest.param("nvimagecodec", marks=pytest.mark.extra)])
def decoder(request):
    if request.param == "nvimagecodec":
        pytest.importorskip("nvidia.nvimgcodec")
    return make_decoder(request.param, max_pixels=50_000_000)


def jpegs(*images):
    array = np.empty((len(images), 1), np.object_)
    array[:, 0] = images
    return request(["PIXELS"], JPEG=array)


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: photo.stem)
def test_both_decoders_give_pillow_pixels_upright_and_in_rgb(decoder, photo):
    expected = ImageOps.exif_transpose(Image.open(photo)).convert("RGB")
    decoded = decoder.decode(photo.read_bytes()).upright()
    assert decoded.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(expected))


@pytest.mark.parametrize(("jpeg", "message"), BAD_IMAGES)
def test_both_decoders_say_what_is_wrong_with_an_image(decoder, jpeg, message):
    with pytest.raises(ImageError, match=message):
        decoder.decode(jpeg)


def test_an_image_at_the_pixel_limit_is_taken_and_one_above_it_is_not():
    jpeg = as_jpeg(Image.new("RGB", (40, 25)))
    assert PillowDecoder(max_pixels=1000).decode(jpeg).stored.size == (40, 25)
    with pytest.raises(ImageError, match="at most 999 pixels, got 40 x 25 = 1000"):
        PillowDecoder(max_pixels=999).decode(jpeg)


def test_stretching_takes_all_of_the_image_into_the_size():
    image = Image.new("RGB", (100, 50), "red")
    image.paste("blue", (50, 0, 100, 50))
    stretched = resize_on_host(
        image, image_settings(SIZE="30, 20", RESIZE_MODE="stretch", INTERPOLATION="nearest")
    )
    assert stretched.size == (20, 30)
    pixels = np.asarray(stretched)
    assert (pixels[:, :10] == [255, 0, 0]).all()
    assert (pixels[:, 10:] == [0, 0, 255]).all()


@pytest.mark.parametrize("upright", [True, False])
def test_padding_keeps_the_proportions(upright):
    image = Image.new("RGB", (50, 100) if upright else (100, 50), "white")
    padded = resize_on_host(
        image, image_settings(SIZE="40", RESIZE_MODE="pad", PAD_COLOR="1, 2, 3")
    )
    pixels = np.asarray(padded.transpose(Image.Transpose.TRANSPOSE) if upright else padded)
    assert (pixels[10:30] == 255).all()
    assert (pixels[:10] == [1, 2, 3]).all()
    assert (pixels[30:] == [1, 2, 3]).all()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["FP32", "FP16", "BF16", "UINT8"])
def test_layout_and_type_of_the_pixels(start, layout, dtype):
    dims = "3, 20, 30" if layout == "NCHW" else "20, 30, 3"
    config = CONFIG.replace("FP32", dtype).replace("3, 224, 224", dims)
    model = start(config + parameters(LAYOUT=layout, RESIZE_MODE="stretch", SIZE="20, 30"))
    (response,) = model.execute([jpegs(PHOTO, PHOTO)])
    pixels = outputs(response)["PIXELS"]
    name = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16", "UINT8": "uint8"}[dtype]
    assert pixels.dtype.name == name
    expected = np.asarray(
        PillowDecoder(10**8).decode(PHOTO).stored.resize((30, 20), Image.Resampling.BILINEAR)
    )
    if dtype != "UINT8":
        expected = (expected / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    if layout == "NCHW":
        expected = expected.transpose(2, 0, 1)
    assert pixels.shape == (2, *expected.shape)
    tolerance = {"FP16": 2e-3, "BF16": 1e-2}.get(dtype, 1e-5)
    np.testing.assert_allclose(pixels[1].astype(np.float64), expected, atol=tolerance)


@pytest.mark.parametrize(
    ("dims", "count", "shape"), [("1", 1, (3, 224, 224)), ("-1", 2, (2, 3, 224, 224))]
)
def test_without_a_batch_dimension(start, dims, count, shape):
    leading = "-1, " if dims == "-1" else ""
    config = CONFIG.replace("max_batch_size: 8", "").replace("[ 1 ]", f"[ {dims} ]")
    model = start(config.replace("3, 224", f"{leading}3, 224"))
    tensor = np.array([PHOTO] * count, np.object_)
    (response,) = model.execute([request(["PIXELS"], JPEG=tensor)])
    assert outputs(response)["PIXELS"].shape == shape


@pytest.mark.parametrize("threads", [1, 3])
def test_a_bad_image_fails_its_own_request_and_no_other(start, threads):
    responses = start(CONFIG + parameters(THREADS=threads)).execute(
        [jpegs(PHOTO, PHOTO), jpegs(PHOTO, b"no", PHOTO, PHOTO[:50]), jpegs(PHOTO)]
    )
    assert [response.error() is None for response in responses] == [True, False, True]
    assert [len(outputs(response)["PIXELS"]) for response in responses[::2]] == [2, 1]
    error = responses[1].error()
    assert error.code() == error.INVALID_ARG
    lines = error.message().splitlines()
    assert [line.split(":")[0] for line in lines] == ["JPEG[1]", "JPEG[3]"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_bug_of_the_backend_is_not_blamed_on_the_image(start, count):
    model = start()

    def broken(image, pixels):
        raise ZeroDivisionError

    model.path.normalization = SimpleNamespace(write=broken)
    with pytest.raises(ZeroDivisionError):
        model.execute([jpegs(*[PHOTO] * count)])


def test_images_are_worked_on_side_by_side_but_one_alone_where_its_request_is(start):
    model = start(CONFIG + parameters(THREADS=2))
    seen = []
    model.path.normalization = SimpleNamespace(
        write=lambda image, pixels: seen.append(threading.current_thread())
    )
    model.execute([jpegs(PHOTO)])
    assert seen == [threading.main_thread()]
    # Neither goes on before the other is there.
    both = threading.Barrier(2)
    model.path.normalization = SimpleNamespace(write=lambda image, pixels: both.wait(30))
    model.execute([jpegs(PHOTO, PHOTO)])


def test_an_output_without_room_fails_its_own_request_and_no_other(start, monkeypatch):
    model = start()
    full = jpegs(PHOTO)

    def no_room(*arguments):
        raise pb_utils.TritonModelException("the memory is full")

    monkeypatch.setattr(type(full), "output", lambda self, *given: outputs_of[id(self)](*given))
    good = jpegs(PHOTO)
    outputs_of = {id(full): no_room, id(good): pb_utils.Tensor.empty}
    refused, answered = model.execute([full, good])
    assert refused.error().code() == pb_utils.TritonError.UNAVAILABLE
    assert refused.error().message() == "the memory is full"
    assert len(outputs(answered)["PIXELS"]) == 1


def test_requests_without_an_image_are_told_so_even_without_room(start, monkeypatch):
    def no_room(*arguments):
        raise pb_utils.TritonModelException("the memory is full")

    many = jpegs(*[b""] * 20_000)
    monkeypatch.setattr(type(many), "output", no_room)
    mixed, empty = start().execute([jpegs(PHOTO, b"no"), many])
    assert mixed.error().code() == empty.error().code() == pb_utils.TritonError.INVALID_ARG
    assert mixed.error().message().startswith("JPEG[1]: expected a JPEG, PNG, WebP or TIFF file")
    lines = empty.error().message().splitlines()
    assert lines[0].startswith("JPEG[0]: ")
    assert lines[100:] == ["and 19900 more bad images"]


def test_numbers_for_levels_up_to_255_are_warned_of(start, capfd):
    start(CONFIG + parameters(NORMALIZE_MEAN="123.675, 116.28, 103.53"))
    said = capfd.readouterr().err
    assert "parameter NORMALIZE_MEAN: expected numbers on a scale of 0 to 1, got (123.675" in said
    assert "NORMALIZE_STD" not in said


def test_parameters_alone_describe_the_tensors(monkeypatch, tmp_path):
    entries = {"SIZE": {"string_value": "64, 32"}, "LAYOUT": {"string_value": "nhwc"}}
    config = {"name": "m", "backend": "image_preproc", "max_batch_size": 4, "parameters": entries}
    completed = complete(monkeypatch, TritonPythonModel, tmp_path, config)
    assert completed["input"] == [{"name": "IMAGE", "data_type": "TYPE_STRING", "dims": [1]}]
    assert completed["output"] == [
        {"name": "PIXELS", "data_type": "TYPE_FP32", "dims": [64, 32, 3]}
    ]
    bare = {**config, "max_batch_size": 0, "input": [], "output": []}
    assert complete(monkeypatch, TritonPythonModel, tmp_path, bare)["output"][0]["dims"][0] == -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RESIZE_SHORTER_SIDE": "200"}, "RESIZE_SHORTER_SIDE: expected at least 224.* got 200"),
        ({"RESIZE_SHORTER_SIDE": "256", "RESIZE_MODE": "pad"}, "RESIZE_MODE crop only, got pad"),
        ({"PAD_COLOR": "1, 2, 3"}, "PAD_COLOR: expected with RESIZE_MODE pad only, got crop"),
        ({"PAD_COLOR": "1, 2, 999", "RESIZE_MODE": "pad"}, "PAD_COLOR: expected numbers from 0 to"),
        ({"MAX_PIXELS": "-1"}, "MAX_PIXELS: expected a whole number of at least 1, got '-1'"),
        ({"THREADS": ""}, "THREADS: expected a whole number of at least 1, got ''"),
        ({"NORMALISE_MEAN": "0, 0, 0"}, "NORMALISE_MEAN: .*; did you mean NORMALIZE_MEAN"),
        (
            {"COLOUR": "BGR"},
            "COLOUR: the backend 'image_preproc' has none of that name; it has DECOD",
        ),
        ({"NORMALIZE_MEAN": "0.5"}, "NORMALIZE_MEAN: expected three numbers"),
        (
            {"NORMALIZE_MEAN": "0, nan, 0"},
            "NORMALIZE_MEAN: expected three numbers .*, got '0, nan, 0'",
        ),
        ({"NORMALIZE_STD": "1, inf, 1"}, "NORMALIZE_STD: expected three numbers"),
        ({"NORMALIZE_STD": "1, 1e-39, 1"}, "expected values that FP32 has, got 1e\\+39 from"),
        ({"HW_LOAD": "nan"}, "HW_LOAD: expected a number from 0 to 1, got 'nan'"),
        ({"NORMALIZE_STD": "0, 1, 1"}, "NORMALIZE_STD: expected numbers above 0"),
        ({"NORMALIZE_STD": "1, 1, 1", "DTYPE": "UINT8"}, "NORMALIZE_STD: expected with DTYPE FP32"),
        ({"DECODER": "magic"}, "DECODER: expected one of auto, nvimagecodec, pillow, got 'magic'"),
        ({"RESIZE_MODE": "zoom"}, "RESIZE_MODE: expected one of crop, stretch, pad, got 'zoom'"),
        ({"INTERPOLATION": "none"}, "INTERPOLATION: expected one of bilinear, nearest, bicubic"),
        ({"LAYOUT": "CHWN"}, "LAYOUT: expected one of NCHW, NHWC, got 'CHWN'"),
        ({"DTYPE": "INT8"}, "DTYPE: expected one of FP32, FP16, BF16, UINT8, got 'INT8'"),
        (
            {"FORMATS": "JPEG, BMP"},
            "FORMATS: expected some of JPEG, PNG, WebP, TIFF, got 'JPEG, BM",
        ),
        ({"FORMATS": ""}, "FORMATS: expected some of JPEG, PNG, WebP, TIFF, got ''"),
        ({"DECODE_ENGINES": "gpu, cpu"}, "DECODE_ENGINES: expected some of hardware, gpu, hybrid"),
        ({"HW_LOAD": "1.5"}, "HW_LOAD: expected a number from 0 to 1, got '1.5'"),
        ({"DECODE_BYTES": "0"}, "DECODE_BYTES: expected a whole number of at least 1, got '0'"),
        ({"SIZE": "0"}, "SIZE: expected 'HEIGHT, WIDTH' or one number for both, got '0'"),
        ({"SIZE": "1, 2, 3"}, "SIZE: expected 'HEIGHT, WIDTH' or one number for both"),
        ({"SIZE": "200"}, r"'PIXELS': expected TYPE_FP32 of dims \[3, 200, 200\], as the param"),
        ({"DTYPE": "FP16"}, r"'PIXELS': expected TYPE_FP16 of dims \[3, 224, 224\]"),
        ({"LAYOUT": "NHWC", "SIZE": "224"}, r"expected TYPE_FP32 of dims \[224, 224, 3\]"),
    ],
)
def test_a_wrong_parameter_is_named_when_the_model_loads(start, change, message):
    with pytest.raises(ValueError, match=message):
        start(CONFIG + parameters(**change))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("TYPE_STRING dims: [ 1 ]", "TYPE_UINT8 dims: [ -1 ]", "input 'JPEG': expected TYPE_STRIN"),
        ("3, 224, 224", "-1, 3, 224, 224", r"'PIXELS': expected TYPE_FP32 of dims \[3, 224, 224\]"),
        ("3, 224, 224", "3, -1, -1", "parameter SIZE: expected the height and width"),
        (
            'output { name: "PIXELS"',
            'output { name: "P" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "PIXELS"',
            "expected one output in config.pbtxt, got 2: P, PIXELS",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(start, old, new, message):
    assert old in CONFIG
    with pytest.raises(ValueError, match=message):
        start(CONFIG.replace(old, new))
