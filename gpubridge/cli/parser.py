"""The parser of all commands, with errors of two lines: usage and error."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn


class UsageError(Exception):
    """Wrong arguments of a command; ``text`` has two lines, usage and error."""

    def __init__(self, usage: str, command: str, message: str) -> None:
        super().__init__(message)
        self.text = f"usage: {usage}  ({command} --help lists all)\nerror: {message}\n"


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated flags that raises UsageError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **options})

    def parse_known(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments of a command; positional ones may be between flags."""
        options, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(self._unknown_text(unknown[0]))
        return options

    def refuse_unknown(self, word: str) -> None:
        """Raise UsageError for an unknown flag."""
        if word.startswith("-") and word.partition("=")[0] not in self._option_string_actions:
            self.error(self._unknown_text(word))

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(self.usage or self.prog, self.prog, message)

    def _unknown_text(self, word: str) -> str:
        """Return the error text of an unknown argument, with a suggestion."""
        if not word.startswith("-"):
            return f"expected flags only, got {word!r}"
        import difflib  # noqa: PLC0415  (slow, and needed only here)

        flag = word.partition("=")[0]
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        plain = "--" + flag.lstrip("-").replace("_", "-").lower()
        close = difflib.get_close_matches(plain, flags, n=1, cutoff=0.85)
        return f"unknown flag {flag}" + (f"; did you mean {close[0]}?" if close else "")


class _Help(argparse.HelpFormatter):
    """Shows defaults, and does not break flags at hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help and action.default not in (None, "", [], argparse.SUPPRESS):
            shown = action.default
            word = str(shown).lower() if isinstance(shown, bool) else "%(default)s"
            return f"{action.help} (default: {word})" if action.nargs != 0 else action.help
        return action.help

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = textwrap.wrap(" ".join(text.split()), width - len(indent), break_on_hyphens=False)
        return "\n".join(indent + line for line in lines)
