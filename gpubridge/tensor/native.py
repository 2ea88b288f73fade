"""Loads ``gpubridge._native``, the compiled module, or returns why it is absent.

The server requires the module (`gpubridge.dataplane`). A stub in an environment of its model's own is told by
the server which file to load (`use_module`): it has the stub's part only, and there may be none. Without it, or with ``GPUBRIDGE_NO_NATIVE=1``, its Python runtime behaves the same and is slower.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Container, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast

from gpubridge.errors import BridgeError

#: Environment variable that turns the compiled module off when set to ``1``.
DISABLE_VARIABLE = "GPUBRIDGE_NO_NATIVE"

#: The command that builds the compiled module.
BUILD_ADVICE = (
    f"build it with {sys.executable} -m pip install . in the source tree (no compiler is needed)"
)

#: A ``PyCapsule``; Python has no name for the type.
Capsule = Any


class CapsuleFields(NamedTuple):
    """Unchecked fields of a DLPack capsule."""

    address: int
    device_type: int
    device_id: int
    code: int
    bits: int
    lanes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    byte_offset: int
    flags: int


class NativeStubLoop(Protocol):
    """Executes batches; see `gpubridge.stub.process`."""

    def next_message(self) -> tuple[bytes, list[int]]:
        """Return the next message that holds no batches, having executed those before it.

        Once the GPU is used, it returns no bytes after each message, or when it is woken.
        """

    def wake_by(self, descriptor: int, /) -> None:
        """Return from `next_message` when a descriptor is readable."""

    def use_device(self) -> None:
        """Have the Executor run all batches from now on: memory of theirs may be on the GPU."""

    def respond(
        self, ticket: int, response: Any, last: bool, wanted: Container[str], consumer: str, /
    ) -> bool:
        """Send a response of an open request, the outputs that are wanted; False if it is not plain.

        ``consumer`` is that of `OutputMemory.place`.
        """

    def watch(self) -> None:
        """Send results that wait for a slow batch, until the channel is closed."""

    def disown(self) -> None:
        """Send nothing more: for a forked child."""


class CapsuleEngine(Protocol):
    """Makes and reads capsules: the compiled module, or `gpubridge.tensor.dlpack_ctypes`."""

    def capsule_read(self, capsule: Capsule, /) -> tuple[Any, ...]:
        """Read the fields of an unconsumed capsule, in the order of `CapsuleFields`."""

    def capsule_take(self, capsule: Capsule, /) -> object:
        """Consume a capsule; the result calls the producer's deleter when it dies."""

    def capsule_make(  # noqa: PLR0913  (the fields of DLPack's struct)
        self,
        owner: object,
        address: int,
        shape: Sequence[int],
        dtype: tuple[int, int],
        device: tuple[int, int],
        flags: int,
        versioned: bool,
        /,
    ) -> Capsule:
        """Make a capsule that keeps `owner` until it is deleted or its consumer releases it."""


class NativeModule(CapsuleEngine, Protocol):
    """Contents of ``gpubridge._native``; a class with a Python counterpart has the same interface."""

    StubLoop: Callable[..., NativeStubLoop]
    WaitPredictor: Callable[..., Any]
    WatchedPages: Callable[..., Any]
    OutputPool: Callable[..., Any]
    CallReader: Callable[..., Any]
    CallWriter: Callable[..., Any]
    CallResponseReader: Callable[..., Any]
    LeaseBook: Callable[..., Any]
    ContextCodec: Callable[..., Any]
    RecordReader: Callable[..., Any]
    CONTEXT_FIELDS: list[tuple[str, int, str]]
    encode_record: Callable[..., bytes]

    def fields_type(self, reference: type, /) -> type:
        """Return the compiled equivalent of a base class in Python; see `fields_type`."""

    def input_by_name(self, inference_request: Any, name: str) -> Any:
        """Return the request's input of that name, or None."""

    def output_by_name(self, inference_response: Any, name: str) -> Any:
        """Return the response's output of that name, or None."""

    def bytes_count(self, buffer: Any, /) -> int:
        """Count the strings of a serialised BYTES tensor; ValueError where it is malformed."""

    def bytes_encode(self, items: Any, /) -> bytes:
        """Serialise a list, or a C-contiguous object array."""

    def bytes_decode(self, buffer: Any, items: Any, /) -> None:
        """Fill a C-contiguous object array; ValueError if malformed or of another count."""

    def arena_set(self, pointer: int, nbytes: int, /) -> None:
        """Set the device memory in which ``gpubridge_arena_malloc`` allocates; see `device_arena`."""

    def arena_state(self) -> tuple[int, int]:
        """Return the bytes in use, and the last size refused since the last call, or 0."""

    def offset_within(self, memory: memoryview, buffer: Any, /) -> int:
        """Return the offset of a C-contiguous buffer within `memory`, or -1."""

    def place(
        self, memory: memoryview, buffers: Sequence[Any], region: int, offset: int, lease: int, /
    ) -> list[int]:
        """Copy buffers to `memory` one after another; see `gpubridge.stub.memory.outputs`."""

    def receive_message(
        self, descriptor: int, scratch: bytearray, /
    ) -> tuple[bytes, list[int], bool]:
        """Receive a message; see `gpubridge.transport.channel`."""


_requiring: list[bool] = []
"""Not empty in a process that requires the module, where the variable applies to stubs only."""


@functools.cache
def _load() -> NativeModule | str:
    """Return the module, or why it is absent."""
    if os.environ.get(DISABLE_VARIABLE) == "1" and not _requiring:
        return f"turned off by {DISABLE_VARIABLE}=1"
    return _import()


_given: list[str] = []
"""The file of the module in an environment of the model's own, or why there is none; empty elsewhere."""


def use_module(given: str) -> None:
    """Load the module from a file, whose path is absolute, or none, for the reason ``given``."""
    _given.append(given)


def _import() -> NativeModule | str:
    name = "gpubridge._native"
    if _given and not _given[-1].startswith("/"):
        return _given[-1]
    try:
        module = _load_file(name, _given[-1]) if _given else importlib.import_module(name)
    # A binary built for another interpreter fails in the dynamic linker (ImportError) or in the
    # module's own version check (SystemError in some releases of the interpreter).
    except (ImportError, SystemError) as error:
        return f"{name} cannot be imported: {error}"
    return cast("NativeModule", module)


def _load_file(name: str, path: str) -> ModuleType:
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
    assert spec is not None
    module = module_from_spec(spec)
    # Before it is executed, as `import` does.
    sys.modules[name] = module
    cast("ExtensionFileLoader", spec.loader).exec_module(module)
    return module


def native() -> NativeModule | None:
    """Return the compiled module, or None where it is absent (see `absence`)."""
    found = _load()
    return None if isinstance(found, str) else found


def fields_type(reference: type) -> Any:
    """Return the compiled equivalent of base class ``reference``; without a module, that itself.

    Requests, responses and tensors derive from it. The compiled class handles common arguments, and
    calls the code of ``reference`` for others.
    """
    compiled = native()
    return reference if compiled is None else compiled.fields_type(reference)


def absence() -> str | None:
    """Return why the compiled module is absent; None if it is loaded."""
    found = _load()
    return found if isinstance(found, str) else None


def native_path() -> str | None:
    """Return the file of the compiled module, for callers of its C functions."""
    return getattr(native(), "__file__", None)


def require_native() -> None:
    """Require the compiled module in this process, the server; the variable applies to stubs only.

    Raises BridgeError with the reason and the build command if it cannot be imported.
    """
    if (reason := import_failure()) is not None:
        raise BridgeError(f"gpubridge requires its compiled module: {reason}; {BUILD_ADVICE}")
    _requiring.append(True)
    _load.cache_clear()


def import_failure() -> str | None:
    """Return why the module cannot be imported, or None, regardless of ``GPUBRIDGE_NO_NATIVE``."""
    found = _import()
    return found if isinstance(found, str) else None
