"""8-bit levels to what the network wants: layout, type, and normalised values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from gpubridge.backends.image_preproc.settings import Settings

__all__ = ["Normalization"]

_LEVELS = 256


class Normalization:
    """``(value / 255 - mean) / std`` per channel, as one multiplication and one addition.

    Both are made in FP32; FP16 and BF16 are rounded from that, once. Of type UINT8 the values stay
    what they are.

    Attributes
    ----------
    element_bytes : int
        Of a value of the output.
    """

    def __init__(self, settings: Settings) -> None:
        self._datatype = settings.dtype
        self.element_bytes = {"FP32": 4, "FP16": 2, "BF16": 2, "UINT8": 1}[settings.dtype]
        self._channels_first = settings.layout == "NCHW"
        spread = np.asarray(settings.std)
        self._scale = (1 / (255 * spread)).astype(np.float32)
        self._offset = (-np.asarray(settings.mean) / spread).astype(np.float32)

    def write(self, image: Image.Image, pixels: npt.NDArray[Any]) -> None:
        """Write the RGB `image` into `pixels`, of the settings' type and layout."""
        source = np.asarray(image)
        scale, offset = self._scale, self._offset
        if self._channels_first:
            source = source.transpose(2, 0, 1)
            scale, offset = scale[:, None, None], offset[:, None, None]
        if self._datatype == "UINT8":
            pixels[...] = source
        elif self._datatype == "FP32":
            np.multiply(source, scale, out=pixels)
            pixels += offset
        else:
            pixels[...] = source * scale + offset

    def levels(self) -> npt.NDArray[np.uint32]:
        """Return what each level of each channel becomes, as the bits of the output's type.

        Returns
        -------
        numpy.ndarray
            uint32 ``[3, 256]``: the value is in the low `element_bytes` of each. A GPU that looks
            values up here writes what `write` does, whatever the type.
        """
        levels = np.arange(_LEVELS, dtype=np.uint8)
        if self._datatype == "UINT8":
            return np.tile(levels.astype(np.uint32), (3, 1))
        values = levels[None, :] * self._scale[:, None] + self._offset[:, None]
        bits: npt.NDArray[np.uint32] = values.view(np.uint32)
        if self._datatype == "BF16":
            # To the nearest, ties to even: NumPy alone has no BF16. No value is NaN or infinite.
            odd = np.right_shift(bits, np.uint32(16)) & np.uint32(1)
            bits = np.right_shift(bits + np.uint32(0x7FFF) + odd, np.uint32(16))
        elif self._datatype == "FP16":
            bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        return bits
