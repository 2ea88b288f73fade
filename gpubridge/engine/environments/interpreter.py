"""A model's interpreter: its version and ABI, and whether a compiled module loads there."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OLDEST = (3, 9)
_OLDEST_COMPILED = (3, 10)
"""nanobind 3, which the module is built with, needs it."""
_OLDEST_STABLE = (3, 12)
STABLE_ABI = "abi3"
"""The ABI of all CPythons from 3.12 on that have the interpreter lock and no debugging."""

_SECONDS = 60.0
"""An interpreter on a network file system may start slowly the first time."""
_ERROR_LENGTH = 500

# Any Python from 2.6 on accepts these flags and runs this. The stub itself checks for NumPy.
_FLAGS = ("-E", "-s", "-S", "-c")
_ASK = """
import sys
print('%d.%d.%d' % sys.version_info[:3])
try:
    import json, os, sysconfig
    include = [sysconfig.get_path('include') or '', sysconfig.get_config_var('INCLUDEPY') or '']
    print(json.dumps({
        'implementation': sys.implementation.name,
        'flags': getattr(sys, 'abiflags', ''),
        'tag': sysconfig.get_config_var('SOABI') or '',
        'include': ([each for each in include if os.path.exists(each + '/Python.h')] + [''])[0],
    }))
except Exception:
    pass
"""
_LOAD = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location('gpubridge._native', loader=ExtensionFileLoader('gpubridge._native', sys.argv[1]))
spec.loader.exec_module(module_from_spec(spec))
"""


class Unusable(Exception):
    """An interpreter cannot run a stub; the message says why."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter, as it describes itself.

    - ``flags``: letters of its ABI: ``t`` of free threading, ``d`` of debugging.
    - ``tag``: names its ABI in the names of compiled modules; empty if it has none.
    - ``include``: the folder of its ``Python.h``; empty if that is not there.
    """

    version: str
    implementation: str = ""
    flags: str = ""
    tag: str = ""
    include: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version in numbers; raises ValueError."""
        return tuple(int(number) for number in self.version.split("."))

    @property
    def abi(self) -> str:
        """The ABI of modules that are built for it."""
        return STABLE_ABI if self.has_stable_abi else self.tag

    @property
    def has_stable_abi(self) -> bool:
        """True if it loads modules of the stable ABI of CPython 3.12."""
        return self.numbers[:2] >= _OLDEST_STABLE and not self.flags

    def refusal(self) -> str:
        """Return why no compiled module is for it, or nothing."""
        if self.implementation != "cpython" or not self.tag:
            return f"compiled modules are for CPython, this is {self.implementation or 'unknown'}"
        if self.numbers < _OLDEST_COMPILED:
            return (
                f"compiled modules are for CPython 3.10 and newer, this is {self.version}; make the environment "
                "with a newer one for a faster stub"
            )
        if "t" in self.flags:
            return (
                f"Python {self.version} is free-threaded, and compiled modules would turn its lock on; use "
                f"CPython {'.'.join(self.version.split('.')[:2])} with the lock for a faster stub"
            )
        return ""

    def __str__(self) -> str:
        name = "CPython" if self.implementation == "cpython" else self.implementation or "Python"
        flags = f" ({self.flags})" if self.flags else ""
        return f"{name} {self.version}{flags} on {platform.machine()}"


async def inspect(python: str, variables: Mapping[str, str]) -> Interpreter:
    """Ask an interpreter what it is; raises Unusable if it does not run, or is older than a stub needs."""
    code, out, err = await _run(python, variables, (_ASK,))
    if code:
        raise Unusable(f"it does not run on this machine: it ended with code {code}: {err}")
    version, _, rest = out.partition("\n")
    try:
        found = Interpreter(version, **json.loads(rest)) if rest else Interpreter(version)
        numbers = found.numbers
    except (ValueError, TypeError):
        raise Unusable(f"it is no Python: asked for its version it says {out!r}") from None
    if numbers < _OLDEST:
        raise Unusable(
            f"it is Python {version}; a stub needs Python 3.9 or newer: make the environment with a "
            "newer one"
        )
    return found


async def load_failure(python: str, variables: Mapping[str, str], module: str) -> str:
    """Return why an interpreter does not load a compiled module, or nothing."""
    try:
        code, _, err = await _run(python, variables, (_LOAD, module))
    except Unusable as error:
        return str(error)
    lines = err.splitlines()
    return f"{lines[-1] if lines else 'it ended'} (code {code})" if code else ""


async def _run(
    python: str, variables: Mapping[str, str], words: Sequence[str]
) -> tuple[int, str, str]:
    """Run a program; return its exit code, and the ends of its output and of its errors."""
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            *_FLAGS,
            *words,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise Unusable(f"it cannot be started: {error.strerror or error}") from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    except asyncio.TimeoutError:
        raise Unusable(f"it did not answer within {_SECONDS:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = err.decode(errors="replace").strip()[-_ERROR_LENGTH:]
    return process.returncode or 0, out.decode(errors="replace").strip(), said
