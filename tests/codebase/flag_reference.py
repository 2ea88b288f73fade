"""The tables of docs/reference/flags.md, from the settings."""

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from gpubridge.cli import COMMANDS
from gpubridge.config import ModelSettings, PythonBackendSettings, ServerSettings
from gpubridge.config.python_backend import _WITHOUT_EFFECT
from gpubridge.flags import Flag, declared_flags
from tests.triton_flags import NEWER, TRITON_2_51

HEAD = """\
# Flags and settings

This file is written by `python -m tests.codebase.references` from the settings themselves; a test keeps it so.

`gpubridge serve` listens on loopback. `tritonserver`, which is installed with the package, is the same
server with Triton's default addresses: it listens on every address of the machine, says so in a warning,
and takes the beginning of a flag for the flag, as Triton does. `--http-address` moves the metrics, too,
unless `--metrics-address` is given; gRPC has its own.

All flags that `tritonserver --help` of 2.51 lists are known, and those that later releases add. They
are served, or [have no effect](#without-effect-here), or [are refused](#refused). Words such as `true` or
`explicit` may be written in capitals. Those that Triton has not are *ours*.

`gpubridge serve models` and `gpubridge serve --model-repository models` are the same. A directory that
holds a `config.pbtxt`, or a version with a model's file, is one model: `gpubridge serve models/sum` serves
nothing else. `eval "$(gpubridge completion bash)"` makes the shell complete flags
(`pip install 'gpubridge[completion]'`; `zsh`, too).
"""
TAIL = """\

More about [limits of connections](protocol.md#limits), [shared memory](protocol.md#shared-memory),
[environments](../how-to/environments.md), [where inputs are](compatibility.md#where-inputs-are),
[backends](backends.md), [debuggers](../how-to/debugging.md#in-a-server).
"""


def document() -> str:
    """The whole file."""
    flags = list(declared_flags(ServerSettings))
    served = [flag for flag in flags if flag.unserved is None]
    parts = [
        HEAD,
        "## Commands\n",
        _table("command", "", rows=[(f"`{name}`", line) for name, line in COMMANDS.items()]),
    ]
    for group in dict.fromkeys(flag.group for flag in served):
        rows = [_served(flag) for flag in served if flag.group == group]
        parts += [f"## {group}\n", _table("flag", "default", "", rows=rows)]
    for title, refused in (("Without effect here", False), ("Refused", True)):
        chosen = [f for f in flags if f.unserved is not None and f.unserved.refused is refused]
        said = "one line in the log says so" if not refused else "the server does not start"
        parts += [
            f"## {title}\n\nFor each, {said}; values that ask for nothing are taken in silence.\n",
            _table("flag", "asks for nothing", "instead", rows=[_unserved(f) for f in chosen]),
        ]
    parts += [
        "## `--backend-config=python,KEY=VALUE`\n",
        _table("key", "default", "", rows=_settings(PythonBackendSettings)),
        f"Triton's {_listed(_WITHOUT_EFFECT)} have no effect, nor have the settings of other backends.\n",
        "## `parameters` in `config.pbtxt`\n\nAll others are the model's own.\n",
        _table("key", "values", "", rows=_parameters()),
    ]
    return "\n".join(parts) + TAIL


def _table(*heads: str, rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _served(flag: Flag) -> tuple[str, ...]:
    names = [flag.name, *(f"--{name}" for name in (flag.alias, *flag.older) if name)]
    text = flag.text if {*names} & {*TRITON_2_51, *NEWER} else f"ours: {flag.text}"
    words = f" ({_listed(flag.choices)})" if flag.choices else ""
    return _listed(names), _value(flag.default), _linked(text) + words


def _linked(text: str) -> str:
    """Make links of the pages that a text names."""
    return re.sub(r"docs/([\w-]+/([\w-]+)\.md(#[\w-]+)?)", r"[\2](../\1)", text)


def _unserved(flag: Flag) -> tuple[str, ...]:
    assert flag.unserved is not None
    return f"`{flag.name}`", " ".join(map(_value, flag.unserved.idle)), flag.unserved.why


def _settings(kind: type) -> list[tuple[str, ...]]:
    return [
        (f"`{each.name.replace('_', '-')}`", _value(each.default), each.metadata["text"])
        for each in fields(kind)
        if each.metadata
    ]


def _parameters() -> list[tuple[str, ...]]:
    return [
        (
            f"`{each.name.upper()}`",
            _listed(each.metadata.get("values", ())),
            each.metadata["text"],
        )
        for each in fields(ModelSettings)
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _value(default: Any) -> str:
    if default in (None, "", (), MISSING) or isinstance(default, type):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
