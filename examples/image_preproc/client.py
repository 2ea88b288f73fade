"""Send photographs to image_preproc, several at a time and as one batch.

python examples/image_preproc/client.py --url 127.0.0.1:8000 [PHOTO ...] [--contact-sheet OUT.png] [--model M]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tritonclient.http as triton
from PIL import Image, ImageDraw, ImageFont, ImageOps

MODEL = "image_preproc"
PHOTOS = Path(__file__).parent / "images"
Pixels = npt.NDArray[np.float32]


class Answer(NamedTuple):
    """One photograph, preprocessed alone: `pixels` is float32, planes or channels last."""

    photo: Path
    pixels: Pixels
    latency_s: float


class Normalization(NamedTuple):
    """Mean and deviation that the model used, per channel, on a scale of 0 to 1; and its layout."""

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    channels_last: bool = False


def example_photos() -> list[Path]:
    """Return the photographs that come with this example, sorted by name."""
    return sorted(PHOTOS.glob("*.jpg"))


def preprocess(
    client: triton.InferenceServerClient, jpegs: Sequence[bytes], model: str = MODEL
) -> Pixels:
    """Return the tensors of `jpegs`, whole JPEG files, in one request: [images, 3, height, width].

    Raises
    ------
    tritonclient.utils.InferenceServerException
        An image cannot be used; the message names it by its index, and says why.
    """
    elements = np.empty((len(jpegs), 1), np.object_)
    elements[:, 0] = jpegs
    image = triton.InferInput("IMAGE", list(elements.shape), "BYTES")
    image.set_data_from_numpy(elements)
    pixels: Pixels = client.infer(model, [image]).as_numpy("PIXELS")
    return pixels


def preprocess_concurrently(
    url: str, photos: Sequence[Path], connections: int, model: str = MODEL
) -> list[Answer]:
    """Send every photograph in a request of its own, `connections` requests at a time.

    Each connection has a thread and a client of its own, since tritonclient's HTTP client belongs
    to the thread that made it. The answers are in the order of `photos`.
    """

    def one_connection(first: int) -> list[Answer]:
        answers = []
        with triton.InferenceServerClient(url) as client:
            for photo in photos[first::connections]:
                jpeg = photo.read_bytes()
                sent = time.perf_counter()
                pixels = preprocess(client, [jpeg], model)[0]
                answers.append(Answer(photo, pixels, time.perf_counter() - sent))
        return answers

    with ThreadPoolExecutor(connections) as threads:
        by_connection = list(threads.map(one_connection, range(connections)))
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(*by_connection))
    return [answer for answer in in_turns if answer is not None]


def normalization(client: triton.InferenceServerClient, model: str = MODEL) -> Normalization:
    """Ask the server for the mean, the deviation and the layout that the model is configured with."""
    parameters = client.get_model_config(model)["parameters"]
    mean, std = (
        np.array([float(number) for number in parameters[key]["string_value"].split(",")])
        for key in ("NORMALIZE_MEAN", "NORMALIZE_STD")
    )
    return Normalization(mean, std, parameters["LAYOUT"]["string_value"] == "NHWC")


def to_image(pixels: Pixels, normalized_with: Normalization) -> Image.Image:
    """Undo the normalisation of one tensor, so that it can be looked at."""
    mean, std, channels_last = normalized_with
    values = (pixels if channels_last else pixels.transpose(1, 2, 0)) * std + mean
    return Image.fromarray((values * 255).round().clip(0, 255).astype(np.uint8))


def draw_contact_sheet(answers: Sequence[Answer], normalized_with: Normalization) -> Image.Image:
    """Return a picture of every original (left) beside what the model made of it (right)."""
    columns, side, margin, caption = 2, 224, 12, 28
    cell_width, cell_height = 2 * side + 3 * margin, side + caption + margin
    rows = -(-len(answers) // columns)
    sheet = Image.new("RGB", (columns * cell_width, rows * cell_height + margin), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(14)
    for index, answer in enumerate(answers):
        left = index % columns * cell_width + margin
        top = index // columns * cell_height + margin
        with Image.open(answer.photo) as photo:
            stored = f"{photo.width} x {photo.height} {photo.mode}"
            original = ImageOps.contain(ImageOps.exif_transpose(photo).convert("RGB"), (side, side))
        preprocessed = to_image(answer.pixels, normalized_with)
        shape = " x ".join(map(str, answer.pixels.shape))
        draw.text((left, top), f"{answer.photo.name}: {stored} -> {shape}", "black", font)
        sheet.paste(original, (left, top + caption))
        sheet.paste(preprocessed.resize((side, side)), (left + side + margin, top + caption))
    return sheet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", nargs="*", type=Path, metavar="PHOTO", help="JPEG files")
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    parser.add_argument("--model", default=MODEL, help="image_preproc or image_preproc_python")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--contact-sheet", type=Path, metavar="OUT.png")
    options = parser.parse_args()
    photos = options.photos or example_photos()

    answers = preprocess_concurrently(options.url, photos, options.connections, options.model)
    print(f"one photograph per request, {options.connections} requests at a time:")
    for photo, pixels, latency_s in answers:
        print(f"  {photo.name:28} {list(pixels.shape)} {pixels.dtype}  {latency_s * 1e3:6.1f} ms")

    with triton.InferenceServerClient(options.url) as client:
        sent = time.perf_counter()
        batch = preprocess(client, [photo.read_bytes() for photo in photos], options.model)
        latency_s = time.perf_counter() - sent
        normalized_with = normalization(client, options.model)
    print(f"all in one request: {list(batch.shape)} {batch.dtype}  {latency_s * 1e3:.1f} ms")
    if not np.array_equal(batch, np.stack([answer.pixels for answer in answers])):
        print("the batch differs from the single answers", file=sys.stderr)
        return 1

    if options.contact_sheet:
        draw_contact_sheet(answers, normalized_with).save(options.contact_sheet)
        print(f"contact sheet: {options.contact_sheet}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
