"""Public names whose working parts are not built yet: they exist, and say so when used."""

from __future__ import annotations

from typing import NoReturn

from gpubridge.pb_utils.exceptions import TritonModelException

__all__ = ["SharedMemory", "refuse"]


def refuse(what: str) -> NoReturn:
    """Raise TritonModelException for something this version cannot do."""
    raise TritonModelException(
        f"{what} is not supported by this version of gpubridge yet; see the compatibility table "
        "in its documentation"
    )


class SharedMemory:
    """Triton's shared memory pool, which gpubridge does not have: there is nothing to measure."""

    __module__ = "c_python_backend_utils"

    def free_memory(self) -> int:
        """Raise: there is no such pool."""
        refuse("shared_memory.free_memory()")
