"""Draw the three pictures of images/ that no camera took: print on paper, metal and a poster.

python examples/ocr_pipeline/draw_pictures.py --output examples/ocr_pipeline/images

Each is a flat print, seen in perspective before a background, with a shadow, uneven light, blur, noise and the
loss of JPEG. Needs numpy, Pillow and Matplotlib (whose DejaVu fonts write the text).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

PHOTOS = Path(__file__).parents[1] / "image_preproc" / "images"
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"

Corners = list[tuple[float, float]]


def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(FONTS / f"{name}.ttf"), size)


def print_receipt() -> Image.Image:
    """Return a café's bill on thermal paper."""
    paper = Image.new("RGB", (560, 760), (246, 244, 238))
    draw = ImageDraw.Draw(paper)
    draw.text((280, 62), "PIKOLO BAR", (40, 40, 44), font("DejaVuSans-Bold", 52), "mm")
    draw.text((280, 124), "Thank you for coming", (60, 60, 64), font("DejaVuSans", 30), "mm")
    mono = font("DejaVuSansMono", 32)
    lines = [("Espresso", "2.40"), ("Cappuccino", "3.80"), ("Apple cake", "4.50")]
    for row, (item, price) in enumerate(lines):
        y = 220 + 64 * row
        draw.text((40, y), item, (50, 50, 54), mono, "lm")
        draw.text((520, y), price, (50, 50, 54), mono, "rm")
    draw.line((40, 420, 520, 420), (90, 90, 94), 3)
    bold = font("DejaVuSansMono-Bold", 44)
    draw.text((40, 480), "TOTAL", (30, 30, 34), bold, "lm")
    draw.text((520, 480), "10.70", (30, 30, 34), bold, "rm")
    draw.text((280, 580), "Table 7 - 14:32", (60, 60, 64), mono, "mm")
    random = np.random.default_rng(7)
    x = 80
    while x < 480:  # a bar code, which is no text
        width = int(random.integers(2, 8))
        draw.rectangle((x, 640, x + width, 720), (40, 40, 44))
        x += width + int(random.integers(3, 9))
    return paper


def print_sign() -> Image.Image:
    """Return a street's enamelled sign."""
    sign = Image.new("RGB", (900, 330), (18, 52, 128))
    draw = ImageDraw.Draw(sign)
    draw.rounded_rectangle((14, 14, 886, 316), 24, outline=(240, 242, 246), width=8)
    draw.text((450, 122), "Harbour Street", (245, 246, 250), font("DejaVuSerif-Bold", 92), "mm")
    draw.text((450, 242), "12 - 48", (245, 246, 250), font("DejaVuSans-Bold", 66), "mm")
    return sign


def print_notice() -> Image.Image:
    """Return a parking notice."""
    notice = Image.new("RGB", (420, 420), (250, 206, 40))
    draw = ImageDraw.Draw(notice)
    draw.rectangle((10, 10, 409, 409), outline=(20, 20, 20), width=6)
    draw.text((210, 90), "NO PARKING", (20, 20, 20), font("DejaVuSans-Bold", 54), "mm")
    draw.text((210, 190), "Mon - Fri", (20, 20, 20), font("DejaVuSans", 50), "mm")
    draw.text((210, 262), "7 am - 6 pm", (20, 20, 20), font("DejaVuSans", 50), "mm")
    draw.text((210, 350), "except residents", (20, 20, 20), font("DejaVuSans-Oblique", 38), "mm")
    return notice


def print_poster() -> Image.Image:
    """Return a poster with the photograph of a rocket."""
    poster = Image.new("RGB", (760, 1000), (236, 228, 208))
    draw = ImageDraw.Draw(poster)
    with Image.open(PHOTOS / "rocket.jpg") as rocket:
        photo = rocket.convert("RGB")
    photo = photo.crop((60, 0, 560, photo.height)).resize((680, 581), Image.Resampling.LANCZOS)
    poster.paste(photo, (40, 220))
    draw.text((380, 78), "NIGHT LAUNCH", (150, 36, 28), font("DejaVuSans-Bold", 82), "mm")
    draw.text((380, 164), "a film about rockets", (60, 54, 48), font("DejaVuSerif", 46), "mm")
    draw.text((380, 866), "Saturday 21 November", (40, 36, 32), font("DejaVuSans-Bold", 46), "mm")
    draw.text((380, 936), "Cinema Aurora, Hall 3", (60, 54, 48), font("DejaVuSans", 42), "mm")
    return poster


def table() -> Image.Image:
    """Return a wooden table with a cup of coffee on it."""
    with Image.open(PHOTOS / "coffee_progressive.jpg") as photo:
        return photo.convert("RGB").resize((1200, 800), Image.Resampling.LANCZOS)


def brick_wall(random: np.random.Generator) -> Image.Image:
    """Return a wall of red bricks."""
    wall = Image.new("RGB", (1200, 800), (150, 140, 130))
    draw = ImageDraw.Draw(wall)
    for row in range(-1, 17):
        for column in range(-1, 10):
            shade = random.integers(-22, 22)
            x, y = 140 * column + 70 * (row % 2), 50 * row
            color = (150 + int(shade), 76 + int(shade) // 2, 58 + int(shade) // 2)
            draw.rectangle((x, y, x + 131, y + 42), color)
    return grain(wall, random, 14)


def plaster(random: np.random.Generator) -> Image.Image:
    """Return a plastered wall."""
    return grain(Image.new("RGB", (1200, 1100), (150, 158, 152)), random, 7)


def grain(image: Image.Image, random: np.random.Generator, strength: float) -> Image.Image:
    """Return the image with a texture of two sizes."""
    values = np.asarray(image, np.float32)
    coarse = random.normal(0, strength, (image.height // 20, image.width // 20))
    spots = Image.fromarray(coarse.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    values = (
        values + np.asarray(spots)[..., None] + random.normal(0, 5, values.shape[:2])[..., None]
    )
    return to_image(values)


def to_image(values: npt.NDArray[Any]) -> Image.Image:
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def put(scene: Image.Image, flat: Image.Image, corners: Corners) -> None:
    """Put a print into the scene, with its corners (from the top left, clockwise) there, and its shadow."""
    sides = [(0, 0), (flat.width, 0), (flat.width, flat.height), (0, flat.height)]
    rows = []
    for (x, y), (u, v) in zip(corners, sides, strict=True):
        rows.append([x, y, 1, 0, 0, 0, -u * x, -u * y])
        rows.append([0, 0, 0, x, y, 1, -v * x, -v * y])
    plane = np.linalg.solve(np.array(rows), np.array(sides, np.float64).ravel()).tolist()
    seen = flat.transform(scene.size, Image.Transform.PERSPECTIVE, plane, Image.Resampling.BICUBIC)
    shape = Image.new("L", scene.size)
    ImageDraw.Draw(shape).polygon(corners, 255)
    shadow = Image.new("L", scene.size)
    ImageDraw.Draw(shadow).polygon([(x + 12, y + 16) for x, y in corners], 130)
    scene.paste((12, 10, 10), mask=shadow.filter(ImageFilter.GaussianBlur(11)))
    scene.paste(seen, mask=shape.filter(ImageFilter.GaussianBlur(0.8)))


def photograph(scene: Image.Image, random: np.random.Generator, light: Corners) -> Image.Image:
    """Return the scene as a camera of middling quality shows it, brighter or darker towards its sides."""
    values = np.asarray(scene.filter(ImageFilter.GaussianBlur(0.9)), np.float32)
    (left, right), (top, bottom) = light
    values *= np.linspace(left, right, scene.width, dtype=np.float32)[None, :, None]
    values *= np.linspace(top, bottom, scene.height, dtype=np.float32)[:, None, None]
    return to_image(values + random.normal(0, 5, values.shape))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the pictures")
    folder = parser.parse_args().output
    random = np.random.default_rng(2026)

    bill = table()
    put(bill, print_receipt(), [(742, 60), (1120, 118), (1046, 702), (640, 620)])
    photograph(bill, random, [(1.05, 0.82), (1.0, 0.92)]).save(folder / "bill.jpg", quality=82)

    street = brick_wall(random)
    put(street, print_sign(), [(90, 150), (716, 92), (720, 330), (92, 366)])
    put(street, print_notice(), [(800, 300), (1094, 322), (1088, 640), (792, 606)])
    photograph(street, random, [(0.75, 1.1), (1.08, 0.8)]).save(folder / "street.jpg", quality=82)

    poster = plaster(random)
    put(poster, print_poster(), [(260, 70), (880, 120), (900, 1000), (230, 1040)])
    photograph(poster, random, [(1.1, 0.72), (1.0, 0.9)]).save(folder / "poster.jpg", quality=82)
    return 0


if __name__ == "__main__":
    sys.exit(main())
