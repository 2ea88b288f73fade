"""Ask what is on photographs: JPEG files in, labels out, three models in between.

python examples/image_preproc/classify.py --url 127.0.0.1:8000 [PHOTO ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tritonclient.http as triton

MODEL, CALLER = "photo_labels", "photo_labels_bls"
PHOTOS = Path(__file__).parent / "images"


class Guess(NamedTuple):
    """A class that a photograph may be of."""

    label: str
    probability: float


def image_input(jpegs: Sequence[bytes]) -> triton.InferInput:
    """Return the input of a request with whole JPEG files."""
    elements = np.empty((len(jpegs), 1), np.object_)
    elements[:, 0] = jpegs
    tensor = triton.InferInput("IMAGE", list(elements.shape), "BYTES")
    tensor.set_data_from_numpy(elements)
    return tensor


def classify(
    client: triton.InferenceServerClient, jpegs: Sequence[bytes], model: str = MODEL
) -> list[list[Guess]]:
    """Return the best guesses for each JPEG file, the likeliest first.

    Raises
    ------
    tritonclient.utils.InferenceServerException
        An image cannot be used; the message names it by its index, and says why.
    """
    result = client.infer(model, [image_input(jpegs)])
    labels, probabilities = result.as_numpy("LABELS"), result.as_numpy("PROBABILITIES")
    return [
        [Guess(label.decode(), float(share)) for label, share in zip(*row, strict=True)]
        for row in zip(labels, probabilities, strict=True)
    ]


def classify_by_extension(
    client: triton.InferenceServerClient, pixels: npt.NDArray[np.float32], count: int
) -> list[list[str]]:
    """Return ``probability:index:label`` of the ``count`` best classes, as the server words them."""
    tensor = triton.InferInput("PIXELS", list(pixels.shape), "FP32")
    tensor.set_data_from_numpy(pixels)
    wanted = triton.InferRequestedOutput("SCORES", class_count=count)
    found = client.infer("classifier", [tensor], outputs=[wanted]).as_numpy("SCORES")
    return [[text.decode() for text in row] for row in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", nargs="*", type=Path, metavar="PHOTO", help="JPEG files")
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    options = parser.parse_args()
    photos = options.photos or sorted(PHOTOS.glob("*.jpg"))
    jpegs = [photo.read_bytes() for photo in photos]

    with triton.InferenceServerClient(options.url) as client:
        by_ensemble = classify(client, jpegs)
        by_calls = classify(client, jpegs, CALLER)
    for photo, guesses in zip(photos, by_ensemble, strict=True):
        listed = ", ".join(f"{label} {share:.2f}" for label, share in guesses)
        print(f"{photo.name:28} {listed}")
    if by_calls != by_ensemble:
        print(f"expected the same of {CALLER}, got {by_calls}", file=sys.stderr)
        return 1
    print(f"{CALLER} says the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
