"""Loads ``gpubridge._native``, the compiled module, or says why it is absent.

The server requires the module (`gpubridge.dataplane`). A stub may run in an interpreter that has no
build of it, or with ``GPUBRIDGE_NO_NATIVE=1``: its Python runtime behaves the same and is slower.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Container, Sequence
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
    """Fields of a DLPack capsule as found: nothing here has been checked."""

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


class NativeCallWriter(Protocol):
    """Encodes calls of other models; see `gpubridge.stub.bls_records`."""

    def write(self, number: int, request: Any, decoupled: bool, /) -> bytes | None:
        """Return the record of a call; None where it is left to Python."""


class NativeCallResponseReader(Protocol):
    """Decodes responses to calls; see `gpubridge.stub.bls_records`."""

    def read(self, message: bytes, /) -> list[tuple[int, int, Any]]:
        """Return number, flags and response (or None) of each; raises ValueError where it cannot."""


class NativeWatchedPages(Protocol):
    """A mapping of a client's memory, whose bytes it exports; see `gpubridge.host_shm.client_region`."""

    lost: bool
    """True if pages that were gone when they were touched hold zeros instead."""
    starved: int
    """Grows with each page that was touched without memory for it, and holds zeros; 0 at first."""

    def renew(self) -> None:
        """Map the object anew in the place of such zeros."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Export the bytes."""


class NativeStubLoop(Protocol):
    """Executes batches; see `gpubridge.stub.compiled_loop`."""

    def next_message(self) -> tuple[bytes, list[int]]:
        """Return the next message that holds no batches, having executed those before it."""

    def respond(
        self, ticket: int, response: Any, last: bool, wanted: Container[str], consumer: str, /
    ) -> bool:
        """Send a response of an open request, the outputs that are wanted; False if it is not plain.

        ``consumer`` is that of `OutputMemory.place`.
        """

    def watch(self) -> None:
        """Send results that wait for a slow batch, until the channel is closed."""

    def give_back(self) -> None:
        """Give the output memory back what is reserved and not in use."""

    def disown(self) -> None:
        """Leave what is shared with the server alone: for a forked child."""


class CapsuleEngine(Protocol):
    """Maker and reader of capsules: the compiled module, or `gpubridge.tensor.dlpack_ctypes`."""

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
        """Make a capsule that holds `owner` until it is deleted or its consumer lets go."""


class NativeModule(CapsuleEngine, Protocol):
    """Contents of ``gpubridge._native``; a class with a Python counterpart has the same interface."""

    StubLoop: Callable[..., NativeStubLoop]
    WatchedPages: Callable[..., NativeWatchedPages]
    CallWriter: Callable[..., NativeCallWriter]
    CallResponseReader: Callable[..., NativeCallResponseReader]
    LeaseBook: Callable[..., Any]
    ContextCodec: Callable[..., Any]
    RecordReader: Callable[..., Any]
    CONTEXT_FIELDS: list[tuple[str, int, str]]
    encode_record: Callable[..., bytes]

    def fields_type(self, reference: type, /) -> type:
        """Give the compiled base class that does what one in Python does; see `fields_type`."""

    def input_by_name(self, inference_request: Any, name: str) -> Any:
        """Give the request's input of that name, or None."""

    def output_by_name(self, inference_response: Any, name: str) -> Any:
        """Give the response's output of that name, or None."""

    def bytes_count(self, buffer: Any, /) -> int:
        """Count the strings of a serialised BYTES tensor; ValueError where it is malformed."""

    def bytes_encode(self, items: Any, /) -> bytes:
        """Serialise a C-contiguous object array."""

    def bytes_decode(self, buffer: Any, items: Any, /) -> None:
        """Fill a C-contiguous object array; ValueError if malformed or of another count."""

    def arena_set(self, pointer: int, nbytes: int, /) -> None:
        """Lend device memory from which ``gpubridge_arena_malloc`` cuts; see `device_arena`."""

    def arena_state(self) -> tuple[int, int]:
        """Return bytes in use, and the last size refused since this was asked last, or 0."""

    def offset_within(self, memory: memoryview, buffer: Any, /) -> int:
        """Return where in `memory` all of a C-contiguous buffer lies, -1 where it does not."""

    def place(
        self, memory: memoryview, buffers: Sequence[Any], region: int, offset: int, lease: int, /
    ) -> list[int]:
        """Copy buffers to `memory` one after another; see `gpubridge.stub.outputs`."""

    def receive_message(
        self, descriptor: int, scratch: bytearray, /
    ) -> tuple[bytes, list[int], bool]:
        """Receive a message; see `gpubridge.transport.channel`."""

    def stay_awake(self, descriptor: int, nanoseconds: int, patience: int, /) -> tuple[bool, int]:
        """Look for something to read; see `gpubridge.transport.short_waits`."""


_requiring: list[bool] = []
"""Not empty in a process that requires the module: the variable is for its stubs then."""


@functools.cache
def _load() -> NativeModule | str:
    """Return the module, or why it is absent."""
    if os.environ.get(DISABLE_VARIABLE) == "1" and not _requiring:
        return f"turned off by {DISABLE_VARIABLE}=1"
    return _import()


def _import() -> NativeModule | str:
    try:
        module = importlib.import_module("gpubridge._native")
    # A binary built for another interpreter fails in the dynamic linker (ImportError) or in the
    # module's own version check (SystemError in some releases of the interpreter).
    except (ImportError, SystemError) as error:
        return f"gpubridge._native cannot be imported: {error}"
    return cast("NativeModule", module)


def native() -> NativeModule | None:
    """Give the compiled module, or None where it is absent (see `absence`)."""
    found = _load()
    return None if isinstance(found, str) else found


def fields_type(reference: type) -> Any:
    """Give the compiled base class that does what ``reference`` does; that where there is none.

    Requests, responses and tensors derive from it. The compiled one takes what is usual, and leaves
    the rest to the code of the other.
    """
    compiled = native()
    return reference if compiled is None else compiled.fields_type(reference)


def absence() -> str | None:
    """Say why the compiled module is absent; None where it is there."""
    found = _load()
    return found if isinstance(found, str) else None


def native_path() -> str | None:
    """Give the file of the compiled module, for those who look for its functions by name."""
    return getattr(native(), "__file__", None)


def require_native() -> None:
    """Use the compiled module from now on, as the server requires; the variable is for its stubs.

    Raises BridgeError: it cannot be imported; the message says why, and the command that builds it.
    """
    if (reason := import_failure()) is not None:
        raise BridgeError(f"gpubridge requires its compiled module: {reason}; {BUILD_ADVICE}")
    _requiring.append(True)
    _load.cache_clear()


def import_failure() -> str | None:
    """Give the reason why the module cannot be imported, whatever ``GPUBRIDGE_NO_NATIVE`` says."""
    found = _import()
    return found if isinstance(found, str) else None
