"""The ``parameters`` of a model's configuration, read one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Parameters"]


class Parameters:
    """Texts by key; each reader raises ValueError with the key, what it expects, and what it got.

    Parameters
    ----------
    entries : mapping
        ``{key: {"string_value": text}}``, as in ``args["model_config"]``.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._texts = {key: str(entry["string_value"]).strip() for key, entry in entries.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    def keys(self) -> list[str]:
        """All keys, in order."""
        return sorted(self._texts)

    def text(self, key: str, default: str) -> str:
        """Return what is written, or the default."""
        return self._texts.get(key, default)

    def whole_number(self, key: str, default: int, least: int = 1) -> int:
        """Return a decimal number."""
        text = self._texts.get(key)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise _wrong(key, f"a whole number of at least {least}", text)
        return int(text)

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """Return one of the choices; upper and lower case are the same."""
        text = self._texts.get(key, default)
        for choice in choices:
            if choice.lower() == text.lower():
                return choice
        raise _wrong(key, f"one of {', '.join(choices)}", text)

    def choices(self, key: str, default: Sequence[str]) -> tuple[str, ...]:
        """Return some of the default's words, which are separated by commas; at least one."""
        text = self._texts.get(key)
        if text is None:
            return tuple(default)
        words = [word.strip().lower() for word in text.split(",")]
        if not set(words) <= {choice.lower() for choice in default}:
            raise _wrong(key, f"some of {', '.join(default)}", text)
        return tuple(choice for choice in default if choice.lower() in words)

    def share(self, key: str, default: float) -> float:
        """Return a number from 0 to 1."""
        (value,) = self.numbers(key, (default,), "a number from 0 to 1")
        if not 0 <= value <= 1:
            raise _wrong(key, "a number from 0 to 1", self._texts[key])
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return self.choice(key, str(default), ("true", "false")) == "true"

    def numbers(self, key: str, default: Sequence[float], what: str) -> tuple[float, ...]:
        """Return as many numbers, separated by commas, as the default has; `what` names them."""
        text = self._texts.get(key)
        if text is None:
            return tuple(default)
        try:
            values = tuple(float(number) for number in text.split(","))
        except ValueError:
            values = ()
        if len(values) != len(default):
            raise _wrong(key, what, text)
        return values


def _wrong(key: str, expected: str, got: str) -> ValueError:
    return ValueError(f"parameter {key}: expected {expected}, got '{got}'")
