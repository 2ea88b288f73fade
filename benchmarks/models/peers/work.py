"""The three works, alike on every server: sum and difference, means of a photograph, a stream of tokens."""

import io

import numpy as np
from PIL import Image

TOKENS = 100


def add_sub(left, right):
    left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
    return left + right, left - right


def means(jpeg):
    """Return the mean of each channel of a photograph that is scaled to 224 × 224."""
    image = (
        Image.open(io.BytesIO(jpeg)).convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)
    )
    return np.asarray(image, np.float32).mean(axis=(0, 1))


def tokens(prompt):
    last = prompt.split()[-1]
    for index in range(TOKENS):
        yield f"{last}:{index} "
