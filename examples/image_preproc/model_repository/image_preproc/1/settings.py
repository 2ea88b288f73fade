"""What config.pbtxt says about this model, read once and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass

DECODERS = ("auto", "nvimagecodec", "pillow")


@dataclass(frozen=True)
class Settings:
    """Sizes in pixels; `mean` and `std` for R, G, B on a scale of 0 to 1."""

    crop_height: int
    crop_width: int
    shorter_side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_pixels: int
    decoder: str
    threads: int

    @classmethod
    def from_model_config(cls, model_config: str) -> Settings:
        """Read the JSON model configuration that the server passes to ``initialize``.

        Raises
        ------
        ValueError
            A parameter is missing or makes no sense; the message names it.
        """
        config = json.loads(model_config)
        parameters = {
            key: value["string_value"].strip() for key, value in config["parameters"].items()
        }
        _, height, width = (int(dim) for dim in config["output"][0]["dims"])
        settings = cls(
            crop_height=height,
            crop_width=width,
            shorter_side=_positive(parameters, "RESIZE_SHORTER_SIDE"),
            mean=_per_channel(parameters, "NORMALIZE_MEAN"),
            std=_per_channel(parameters, "NORMALIZE_STD"),
            max_pixels=_positive(parameters, "MAX_PIXELS"),
            decoder=_text(parameters, "DECODER"),
            threads=_positive(parameters, "THREADS"),
        )
        if settings.shorter_side < max(height, width):
            raise ValueError(
                f"parameter RESIZE_SHORTER_SIDE: expected at least {max(height, width)}, the size "
                f"of the crop (dims of PIXELS), got {settings.shorter_side}"
            )
        if min(settings.std) <= 0:
            raise ValueError(
                f"parameter NORMALIZE_STD: expected numbers above 0, got {settings.std}"
            )
        if settings.decoder not in DECODERS:
            raise ValueError(
                f"parameter DECODER: expected one of {', '.join(DECODERS)}, got {settings.decoder}"
            )
        return settings


def _text(parameters: dict[str, str], key: str) -> str:
    if key not in parameters:
        raise ValueError(f"parameter {key}: expected in config.pbtxt, got none; add it")
    return parameters[key]


def _positive(parameters: dict[str, str], key: str) -> int:
    text = _text(parameters, key)
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"parameter {key}: expected a whole number above 0, got '{text}'")
    return int(text)


def _per_channel(parameters: dict[str, str], key: str) -> tuple[float, ...]:
    text = _text(parameters, key)
    try:
        values = tuple(float(number) for number in text.split(","))
    except ValueError:
        values = ()
    if len(values) != 3:
        raise ValueError(f"parameter {key}: expected three numbers 'R, G, B', got '{text}'")
    return values
