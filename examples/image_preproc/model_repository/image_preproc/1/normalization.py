"""8-bit pixels to normalised floats in planes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image


class Normalization:
    """``(value / 255 - mean) / std`` per channel, as one multiplication and one addition."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        spread = np.asarray(std)
        self._scale = self._per_plane(1 / (255 * spread))
        self._offset = self._per_plane(-np.asarray(mean) / spread)

    @staticmethod
    def _per_plane(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        return values.astype(np.float32).reshape(-1, 1, 1)

    def write(self, image: Image.Image, planes: npt.NDArray[np.float32]) -> None:
        """Write the RGB `image` (height x width) into `planes` (float32, [3, height, width])."""
        channels_first = np.asarray(image).transpose(2, 0, 1)
        np.multiply(channels_first, self._scale, out=planes)
        planes += self._offset
