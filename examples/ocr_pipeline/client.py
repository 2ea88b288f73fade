"""Read the text of photographs: image files in, lines of text with their places out.

python examples/ocr_pipeline/client.py --url 127.0.0.1:8000 [--output DIR] [PHOTO ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tritonclient.http as triton
from PIL import Image, ImageDraw, ImageFont, ImageOps

MODEL, CALLER = "read_text", "read_text_bls"
IMAGES = Path(__file__).parent / "images"
HOPPER = Path(__file__).parents[1] / "image_preproc" / "images" / "grace_hopper.jpg"
TRUTH: dict[str, list[str]] = json.loads((IMAGES / "truth.json").read_text("utf-8"))
COLORS = ["#e6194b", "#2f8f3e", "#4363d8", "#d2691e", "#911eb4", "#00808a", "#b5179e", "#7a6a00"]


class Line(NamedTuple):
    """A line of text: its certainty, and its corners from the top left one, clockwise."""

    text: str
    score: float
    corners: npt.NDArray[np.float32]


def example_photos() -> list[Path]:
    """Return the pictures whose text is known."""
    return sorted([*IMAGES.glob("*.jpg"), HOPPER], key=lambda path: path.name)


def read_text(client: triton.InferenceServerClient, image: bytes, model: str = MODEL) -> list[Line]:
    """Return the lines of an image file, from top to bottom, without those that cannot be read.

    Raises
    ------
    tritonclient.utils.InferenceServerException
        The file is no image that can be used; the message says why.
    """
    tensor = triton.InferInput("IMAGE", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[image]], np.object_))
    result = client.infer(model, [tensor])
    texts, scores, boxes = (result.as_numpy(name) for name in ("TEXT", "SCORE", "BOX"))
    lines = [
        Line(text.decode(), float(score), corners)
        for text, score, corners in zip(texts, scores, boxes, strict=True)
    ]
    return [line for line in lines if line.text]


def character_accuracy(read: Sequence[str], truth: Sequence[str]) -> float:
    """Return 1 less the edits that make `truth` of `read`, for each character of `truth`; 0 at least."""
    got, wanted = "\n".join(read), "\n".join(truth)
    row = list(range(len(wanted) + 1))
    for count, mine in enumerate(got, 1):
        previous, row = row, [count]
        for index, theirs in enumerate(wanted):
            replaced = previous[index] + (mine != theirs)
            row.append(min(replaced, previous[index + 1] + 1, row[index] + 1))
    return max(0.0, 1 - row[-1] / len(wanted))


def draw_answer(path: Path, lines: Sequence[Line], height: int = 480) -> Image.Image:
    """Return the picture with the boxes on it, and the text beside it."""
    with Image.open(path) as opened:
        photo = ImageOps.exif_transpose(opened).convert("RGB")
    scale = height / photo.height
    photo = photo.resize((round(photo.width * scale), height), Image.Resampling.LANCZOS)
    size = min(26, (height - 70) // max(1, len(lines)) - 8)
    font, small = ImageFont.load_default(size), ImageFont.load_default(15)
    longest = max((font.getlength(line.text) for line in lines), default=0)
    sheet = Image.new("RGB", (photo.width + max(320, round(longest) + 90), height), "white")
    sheet.paste(photo)
    draw = ImageDraw.Draw(sheet, "RGBA")
    draw.text((photo.width + 24, 16), f"{path.name}: {len(lines)} lines", "#777777", small)
    y = 52.0
    for index, line in enumerate(lines):
        color = COLORS[index % len(COLORS)]
        corners = [tuple(corner) for corner in (line.corners * scale).tolist()]
        draw.polygon(corners, fill=f"{color}30", outline=color, width=3)
        draw.rectangle((photo.width + 24, y + 2, photo.width + 30, y + size), color)
        draw.text((photo.width + 42, y), line.text, "#222222", font)
        y += size + 8
    return sheet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", nargs="*", type=Path, metavar="PHOTO", help="image files")
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    parser.add_argument("--output", type=Path, help="folder for the pictures with their text")
    options = parser.parse_args()

    same = True
    with triton.InferenceServerClient(options.url) as client:
        for path in options.photos or example_photos():
            image = path.read_bytes()
            lines = read_text(client, image)
            print(f"{path.name}:")
            for line in lines:
                print(f"    {line.text}")
            if path.name in TRUTH:
                right = character_accuracy([line.text for line in lines], TRUTH[path.name])
                print(f"  {right:.1%} of its characters are right")
            called = read_text(client, image, CALLER)
            same &= [line.text for line in called] == [line.text for line in lines]
            if options.output:
                options.output.mkdir(parents=True, exist_ok=True)
                draw_answer(path, lines).save(options.output / f"{path.stem}.png")
    if not same:
        print(f"expected the same text of {CALLER}, got another", file=sys.stderr)
        return 1
    print(f"{CALLER} reads the same")
    if options.output:
        print(f"the pictures with their text are in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
