"""Where a caller wants the outputs of a model that it calls."""

from __future__ import annotations

from gpubridge.pb_utils.arguments import integer, wrong_type
from gpubridge.pb_utils.named_enum import NamedEnum

__all__ = ["MemoryType", "PreferredMemory"]


class MemoryType(NamedEnum):
    """Where a caller wants the outputs of a model it calls."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


MemoryType.__module__ = "c_python_backend_utils"


class PreferredMemory:
    """Where a caller wants the outputs of a model it calls.

    Parameters
    ----------
    preferred_memory_type : MemoryType
        ``TRITONSERVER_MEMORY_GPU`` or ``TRITONSERVER_MEMORY_CPU``.
    preferred_device_id : int, optional
        The GPU's ordinal.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise wrong_type("preferred_memory_type", "a MemoryType", preferred_memory_type)
        self._memory_type = preferred_memory_type
        self._device_id = integer(preferred_device_id, "preferred_device_id")
