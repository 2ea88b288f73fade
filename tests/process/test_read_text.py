"""The pipeline of examples/ocr_pipeline: pictures to text, as an ensemble and by calls."""

import contextlib
import importlib.util
import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image, ImageDraw, ImageFont
from tritonclient.utils import InferenceServerException

from tests.codebase.test_docs import blocks, write_files
from tests.commands import run_command
from tests.process.server import running_server
from tests.process.test_examples_answer import SHOWN

pytestmark = pytest.mark.extra

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ocr_pipeline"
if importlib.util.find_spec("rapidocr") is None:
    pytest.skip("the networks are those of the package rapidocr", allow_module_level=True)
if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("the networks need onnxruntime", allow_module_level=True)

spec = importlib.util.spec_from_file_location("ocr_client", EXAMPLE / "client.py")
example = importlib.util.module_from_spec(spec)
sys.modules["ocr_client"] = example  # where its NamedTuple looks for names
spec.loader.exec_module(example)

PHOTOS = example.example_photos()
NAMES = ["read_text", "read_text_bls"]


@pytest.fixture(scope="module")
def server(repository):
    command = [sys.executable, str(EXAMPLE / "install_models.py"), str(repository)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    with running_server(repository) as running:
        yield running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.http_url, network_timeout=120) as client:
        yield client


def encode(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def texts(lines):
    return [line.text for line in lines]


def blank():
    # The networks take three times as long for white, whose values become denormal.
    return encode(Image.new("RGB", (300, 300), "lightsteelblue"))


def recognised(client):
    """Count the strips that were recognised so far."""
    (found,) = client.get_inference_statistics("text_recognizer")["model_stats"]
    return int(found["inference_count"])


class Run(NamedTuple):
    """What the example's client printed and drew, and the lines that it got by photograph and model."""

    shown: str
    pictures: Path
    lines: dict[tuple[str, str], list[example.Line]]


@pytest.fixture(scope="module")
def run(server, tmp_path_factory):
    """Run the README's command in this process, as each of its requests keeps two processors for a second."""
    ((command, _),) = SHOWN.findall((EXAMPLE / "README.md").read_text())
    words = [server.http_url if word == "127.0.0.1:8000" else word for word in command.split()]
    assert words[0] == "examples/ocr_pipeline/client.py"
    made = Run("", tmp_path_factory.mktemp("pictures"), {})
    names = {photo.read_bytes(): photo.name for photo in PHOTOS}
    ask = example.read_text

    def recorded(client, image, model=NAMES[0]):
        return made.lines.setdefault((names[image], model), ask(client, image, model))

    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(shown):
        patched.setattr(example, "read_text", recorded)
        patched.setattr(sys, "argv", [*words, "--output", str(made.pictures)])
        assert example.main() == 0
    return made._replace(shown=shown.getvalue())


@pytest.fixture
def read(run):
    """Give what a model read in a photograph."""
    return lambda photo, model: run.lines[photo.name, model]


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: photo.stem)
def test_what_is_read_is_what_is_written_there(read, photo, model):
    lines = read(photo, model)
    truth = example.TRUTH[photo.name]
    # What networks compute differs in its last bits from one processor to the other.
    assert example.character_accuracy(texts(lines), truth) >= 0.97
    assert len(lines) == len(truth)


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: photo.stem)
def test_calls_read_what_the_ensemble_reads(read, photo):
    by_ensemble, by_calls = (read(photo, model) for model in NAMES)
    assert texts(by_calls) == texts(by_ensemble)
    for mine, theirs in zip(by_calls, by_ensemble, strict=True):
        np.testing.assert_array_equal(mine.corners, theirs.corners)
        # Strips are padded to different widths, which the network sees.
        assert mine.score == pytest.approx(theirs.score, abs=0.1)


@pytest.mark.parametrize("model", NAMES)
def test_a_picture_without_text_has_no_line(client, model):
    before = recognised(client)
    assert example.read_text(client, blank(), model) == []
    assert recognised(client) - before == (1 if model == "read_text" else 0)


@pytest.mark.parametrize("model", NAMES)
def test_lines_lie_where_they_were_drawn(client, model):
    """Also where they run downwards, and where the file says that it is to be turned."""
    image = Image.new("RGB", (900, 700), "white")
    font = ImageFont.load_default(44)
    draw = ImageDraw.Draw(image)
    draw.text((120, 80), "Flour and water", "black", font)
    draw.text((520, 300), "Salt", "black", font)
    downwards = Image.new("RGB", (420, 60), "white")
    ImageDraw.Draw(downwards).text((5, 2), "Bake for an hour", "black", font)
    image.paste(downwards.rotate(-90, expand=True), (60, 240))
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3
    image.rotate(180).save(file, "JPEG", quality=95, exif=exif)
    found = {line.text: line.corners for line in example.read_text(client, file.getvalue(), model)}
    assert set(found) == {"Flour and water", "Salt", "Bake for an hour"}
    end = 245 + font.getlength("Bake for an hour")
    first = draw.textbbox((120, 80), "Flour and water", font)
    assert_around(found["Flour and water"], first)
    assert_around(found["Salt"], draw.textbbox((520, 300), "Salt", font))
    assert_around(found["Bake for an hour"], (68, 245, 112, end))


def assert_around(corners, box):
    """The corners are those of the box, a few pixels further out."""
    left, top, right, bottom = box
    assert corners[0] == pytest.approx((left, top), abs=22)
    assert corners[2] == pytest.approx((right, bottom), abs=22)


@pytest.mark.parametrize("model", NAMES)
def test_many_lines_come_back_in_their_order(client, model):
    image = Image.new("RGB", (900, 950), "white")
    written = [f"Item {index:02} {'of a long list ' * (index % 3)}".strip() for index in range(22)]
    for index, line in enumerate(written):
        place = (40, 20 + 42 * index)
        ImageDraw.Draw(image).text(place, line, "black", ImageFont.load_default(28))
    assert texts(example.read_text(client, encode(image), model)) == written


@pytest.mark.parametrize("model", NAMES)
def test_a_bad_file_is_named(client, model):
    photo = PHOTOS[0].read_bytes()
    with pytest.raises(InferenceServerException, match="expected a whole JPEG file"):
        example.read_text(client, photo[: len(photo) // 2], model)
    with pytest.raises(InferenceServerException, match="IMAGE"):
        example.read_text(client, b"no image", model)
    assert example.read_text(client, photo, model)


def test_clients_at_the_same_time_get_their_own_text(server):
    asked = [(photo, model) for photo in PHOTOS[:2] for model in NAMES]

    def one(photo, model):
        with triton.InferenceServerClient(server.http_url, network_timeout=120) as own:
            lines = example.read_text(own, photo.read_bytes(), model)
        assert example.character_accuracy(texts(lines), example.TRUTH[photo.name]) >= 0.97

    with ThreadPoolExecutor(len(asked)) as threads:
        list(threads.map(lambda each: one(*each), asked))


def test_the_client_shows_what_the_readme_shows(run):
    ((_, output),) = SHOWN.findall((EXAMPLE / "README.md").read_text())
    assert run.shown == f"{output}the pictures with their text are in {run.pictures}\n"
    for photo in PHOTOS:
        drawing = run.pictures / f"{photo.stem}.png"
        with Image.open(photo) as original, Image.open(drawing) as drawn:
            assert drawn.width > original.width * drawn.height / original.height + 300
            colors = {color for _, color in drawn.convert("RGB").getcolors(1 << 24)}
            assert (230, 25, 75) in colors  # the first box's


def test_the_tutorial_does_what_it_says(server, tmp_path):
    page = ROOT / "docs" / "tutorials" / "read-text.md"
    write_files(page, tmp_path)
    script = tmp_path / "client.py"
    script.write_text(script.read_text().replace("127.0.0.1:8000", server.http_url))
    finished = run_command([sys.executable, script], cwd=ROOT)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout in blocks(page, "")


def test_a_missing_package_is_named(tmp_path):
    code = (
        "import importlib.util, runpy, sys; importlib.util.find_spec = lambda name: None;"
        f"sys.argv = ['install', {str(tmp_path / 'models')!r}];"
        f"runpy.run_path({str(EXAMPLE / 'install_models.py')!r}, run_name='__main__')"
    )
    finished = run_command([sys.executable, "-c", code])
    assert finished.returncode == 1
    assert "pip install --no-deps 'rapidocr==" in finished.stderr
    assert not (tmp_path / "models").exists()


@pytest.mark.skipif(importlib.util.find_spec("cv2") is None, reason="rapidocr itself needs OpenCV")
@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: photo.stem)
def test_rapidocr_reads_the_same(read, photo, oracle):
    """The package's own pipeline with the same networks: other code before, between and after them."""
    theirs = oracle(str(photo))
    mine = {line.text: line.corners for line in read(photo, NAMES[0])}
    compared = 0
    for text, score, corners in zip(theirs.txts, theirs.scores, theirs.boxes, strict=True):
        if score < 0.97 or text not in example.TRUTH[photo.name]:
            continue  # what it does not read well itself
        assert text in mine
        # It makes the boxes in another scale of the picture.
        height = np.linalg.norm(mine[text][3] - mine[text][0])
        assert np.abs(mine[text] - corners).max() < 0.5 * height
        compared += 1
    assert compared >= 0.6 * len(example.TRUTH[photo.name])


@pytest.fixture(scope="module")
def oracle():
    return importlib.import_module("rapidocr").RapidOCR()
