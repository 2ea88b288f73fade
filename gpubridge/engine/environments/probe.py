"""Whether the interpreter of an environment runs on this machine, and is new enough."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpubridge.engine.environment import PARAMETER, StubEnvironment
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["check_interpreter"]

_SECONDS = 60.0
"""An interpreter on a network's disk may take long the first time."""

_OLDEST = (3, 9)
_ERROR_LENGTH = 500
# Any Python from 2.6 on takes these flags and runs this. NumPy is looked for in the stub, which
# imports it anyway.
_ASK = ("-E", "-s", "-S", "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])")


async def check_interpreter(environment: StubEnvironment, source: Path) -> str:
    """Return the version of an environment's interpreter.

    Parameters
    ----------
    source : Path
        What the user named, for errors.

    Raises
    ------
    BridgeError
        INVALID_ARG when it does not run, or is older than a stub needs.
    """
    version = await _ask(environment, source)
    try:
        numbers = tuple(int(number) for number in version.split("."))
    except ValueError:
        raise _unusable(
            environment, source, f"it is no Python: asked for its version it says {version!r}"
        ) from None
    if numbers < _OLDEST:
        raise _unusable(
            environment,
            source,
            f"it is Python {version}; a stub needs Python 3.9 or newer: make the environment with a "
            "newer one",
        )
    return version


async def _ask(environment: StubEnvironment, source: Path) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            environment.python,
            *_ASK,
            env=environment.variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise _unusable(
            environment, source, f"it cannot be started: {error.strerror or error}"
        ) from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    except asyncio.TimeoutError:
        raise _unusable(
            environment, source, f"it did not say its version within {_SECONDS:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = err.decode(errors="replace").strip()[-_ERROR_LENGTH:]
        raise _unusable(
            environment,
            source,
            f"it does not run on this machine: it ended with code {process.returncode}: {said}",
        )
    return out.decode(errors="replace").strip()


def _unusable(environment: StubEnvironment, source: Path, why: str) -> BridgeError:
    return BridgeError(
        f"{PARAMETER} {source}: its interpreter {environment.python} cannot be used: {why}",
        ErrorCode.INVALID_ARG,
    )
