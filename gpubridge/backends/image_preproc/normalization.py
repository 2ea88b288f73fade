"""8-bit pixels to what the network wants: layout, type, and normalised values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from gpubridge.backends.image_preproc.settings import Settings

__all__ = ["Normalization"]


class Normalization:
    """``(value / 255 - mean) / std`` per channel, as one multiplication and one addition.

    Of type uint8 the values stay what they are.
    """

    def __init__(self, settings: Settings) -> None:
        self.dtype: np.dtype[Any] = np.dtype(_DTYPES[settings.dtype])
        self._channels_first = settings.layout == "NCHW"
        spread = np.asarray(settings.std)
        self._scale = self._per_channel(1 / (255 * spread))
        self._offset = self._per_channel(-np.asarray(settings.mean) / spread)

    def _per_channel(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        return values.astype(np.float32).reshape((-1, 1, 1) if self._channels_first else (1, 1, -1))

    def write(self, image: Image.Image, pixels: npt.NDArray[Any]) -> None:
        """Write the RGB `image` into `pixels`, of the settings' type and layout."""
        source = np.asarray(image)
        if self._channels_first:
            source = source.transpose(2, 0, 1)
        if self.dtype == np.uint8:
            pixels[...] = source
        elif self.dtype == np.float32:
            np.multiply(source, self._scale, out=pixels)
            pixels += self._offset
        else:
            # Rounded once, at the end.
            pixels[...] = source * self._scale + self._offset


_DTYPES = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8}
