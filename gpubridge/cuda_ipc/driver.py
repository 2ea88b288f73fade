"""Calls of the CUDA driver, which is loaded by the first call; every failure is a typed error.

Importing the package loads nothing of CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import threading
from queue import SimpleQueue
from typing import Any, Callable

from gpubridge.errors import BridgeError, ErrorCode, invalid

OUT_OF_MEMORY = 2
NOT_READY = 600
_UNKNOWN = 999
NOT_SUPPORTED = 801
CAPTURES = range(900, 910)
"""Statuses caused by the capture of a graph."""
_LEGACY_STREAM = 1
HANDLE_BYTES = 64
# Not a status of the driver: the call did not reach it.
_NOT_FOUND = -1
_OLDEST_BINDINGS = (12, 9, 1)

# After these, all calls on the process's context of that device fail.
_STICKY = frozenset(
    {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}
)

_FOREIGN = (
    "to the driver the handle is this process's own: it was made here, or by a process with the same "
    "number in another container (most often both are number 1); start both containers with one PID "
    "namespace (--pid=host or --pid=container:NAME, shareProcessNamespace in a pod), or one of them "
    "with --init"
)
_NO_IPC = "this device or platform has no legacy CUDA IPC (WSL2, MIG and some sandboxes do not)"
_NO_FDS = (
    "this device or platform does not share device memory by file descriptors (WSL2 and some "
    "sandboxes do not)"
)
_NEWER_CODE = (
    "the code is for a newer CUDA release than the driver knows, or for another GPU: gpubridge doctor "
    "compares them; with a driver before R580, pip install 'gpubridge[image-gpu-cu12]' instead of "
    "'gpubridge[image-gpu]', or update the driver"
)
_NO_PINNING = (
    "pinned memory has to be there as a whole, and nothing of it is swapped out: raise the container's "
    "limit of memory, or lower --request-arena-limit and --output-arena-limit (the driver heeds no "
    "ulimit -l; WSL2 pins no more than Windows lets it)"
)
_SAME_BLOCK = (
    "this driver opens a block of 2 MiB, which allocations up to 1 MiB share, only once: register "
    "one region and use offsets, or allocate more than 1 MiB for each"
)
_LOST = (
    "a second question has the same answer, so that the device is lost to this process, or fell off the "
    "bus: look at nvidia-smi and the kernel's log (Xid); the process has to be started again"
)
_RESTART = "the device's context in this process is lost: the process has to be started again"
# Advice by the driver's status; below, advice for one call and status.
_ADVICE = {
    _NOT_FOUND: "update the NVIDIA driver",
    1: "the driver takes no such argument; update gpubridge, cuda-python or the driver",
    2: "free device memory: fewer model instances on this GPU, less cached by frameworks, or "
    "smaller arenas (--backend-config=python,device-arena-bytes=N)",
    3: "CUDA does not outlive fork: start the process anew (multiprocessing's `spawn`)",
    4: "the process is about to end",
    34: "a stub library stands before the driver: take the toolkit's stubs folder out of "
    "LD_LIBRARY_PATH",
    35: _NEWER_CODE,
    46: "another process has this GPU for itself: nvidia-smi -c DEFAULT",
    100: "check CUDA_VISIBLE_DEVICES, and that the container was started with access to GPUs",
    101: "check CUDA_VISIBLE_DEVICES and the model's `gpus`",
    200: _NEWER_CODE,
    201: "a device's context has to be current first",
    209: _NEWER_CODE,
    217: "the two GPUs cannot reach each other's memory; tensors cross in host memory instead",
    222: _NEWER_CODE,
    304: "the system refused it; in a container or sandbox, allow access to the GPU's devices",
    709: _RESTART,
    800: "the sandbox or the driver's settings forbid it",
    801: "this device or driver cannot do it",
    802: "start nvidia-fabricmanager, then try again",
    803: "the driver's library and kernel module differ: restart the machine",
    804: "the CUDA compatibility library does not fit this GPU: update the NVIDIA driver",
    999: "look at nvidia-smi and the kernel's log; loading nvidia-uvm again may help",
}
_ADVICE_OF_CALL = {
    ("cuIpcOpenMemHandle", 1): _FOREIGN,
    ("cuIpcOpenMemHandle", 101): "the memory is on another GPU: name the device it was made on",
    ("cuIpcOpenMemHandle", 201): _FOREIGN,
    ("cuIpcOpenMemHandle", 208): _SAME_BLOCK,
    ("cuIpcOpenMemHandle", 304): _FOREIGN,
    ("cuIpcOpenMemHandle", 400): _FOREIGN,
    ("cuIpcOpenMemHandle", 801): _NO_IPC,
    ("cuIpcGetMemHandle", 1): "only memory of cuMemAlloc (cudaMalloc) can be shared",
    ("cuIpcGetMemHandle", 801): _NO_IPC,
    ("cuIpcGetEventHandle", 801): _NO_IPC,
    ("cuIpcOpenEventHandle", 801): _NO_IPC,
    ("cuMemGetAllocationGranularity", 801): _NO_FDS,
    ("cuMemCreate", 801): _NO_FDS,
    ("cuMemExportToShareableHandle", 801): _NO_FDS,
    ("cuMemImportFromShareableHandle", 801): _NO_FDS,
    ("cuMemImportFromShareableHandle", 1): "the descriptor is not one of device memory",
    ("cuMemSetAccess", 101): "the memory is on another GPU, which this one does not reach",
    ("cuMemHostRegister", 1): "the memory cannot be pinned; copies of it are slower",
    ("cuMemHostRegister", 2): _NO_PINNING,
    ("cuMemHostRegister", 801): "the memory cannot be pinned here; copies of it are slower",
}


class DriverAbsent(BridgeError):
    """There is no CUDA driver, or no cuda-python to reach it; the message says which."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)


class CudaError(BridgeError):
    """A call of the driver failed: UNAVAILABLE for want of device memory, INTERNAL otherwise.

    - ``status``: the driver's status, and ``name``, its name; -1 if there is no such function.
    - ``sticky``: whether all further calls of this process fail, so that it has to be restarted;
      ``lost`` says so of a status that alone does not.
    """

    def __init__(self, call: str, status: int, name: str, *, lost: bool = False) -> None:
        self.call = call
        self.status = status
        self.name = name
        self.sticky = lost or status in _STICKY
        advice = _ADVICE_OF_CALL.get((call, status)) or _ADVICE.get(status)
        if lost:
            advice = _LOST
        if advice is None:
            advice = _RESTART if self.sticky else "see the CUDA driver's documentation"
        code = ErrorCode.UNAVAILABLE if status == OUT_OF_MEMORY else ErrorCode.INTERNAL
        super().__init__(f"{call} failed: {name} ({status}): {advice}", code)


_loaded: Any = None


def load() -> Any:
    """Return the module ``cuda.bindings.driver``, after ``cuInit``; DriverAbsent or CudaError."""
    global _loaded  # noqa: PLW0603  (once per process, as the driver itself)
    if _loaded is not None:
        return _loaded
    driver = import_bindings()
    try:
        answer = driver.cuInit(0)
    except RuntimeError as error:
        raise DriverAbsent(f"no CUDA driver: {error}") from error
    except (KeyError, ValueError) as error:
        raise CudaError("cuInit", _NOT_FOUND, str(error)) from error
    if answer[0]:
        raise _failure("cuInit", answer[0])
    _loaded = driver
    return driver


def bindings_absence() -> str:
    """Return why there is no cuda-python in this process, or an empty string; loads nothing of CUDA."""
    # Another module called cuda may be no package, or fail.
    with contextlib.suppress(ImportError):
        if importlib.util.find_spec("cuda.bindings"):
            return ""
    return "there is no cuda-python: pip install 'gpubridge[gpu]'"


def call(name: str, *arguments: object) -> Any:
    """Call a driver function; return None, its value, or a tuple of values; may raise CudaError."""
    answer = _answer(name, arguments)
    if answer[0]:
        raise _failure(name, answer[0])
    if len(answer) == 2:
        return answer[1]
    return answer[1:] or None


def status_of(name: str, *arguments: object, expected: tuple[int, ...]) -> int:
    """Call a driver function and return its status; CudaError unless success or ``expected``."""
    status = _answer(name, arguments)[0]
    if status and int(status) not in expected:
        raise _failure(name, status)
    return int(status)


class DriverThread:
    """Executes calls in order on one thread, which sleeps while there are none."""

    def __init__(self) -> None:
        # For finalizers: its `put` takes no lock that an interrupted `put` could hold.
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Queue a call without a result; any thread and finalizers may use this."""
        self._queue.put(work)

    def finish(self) -> None:
        """Wait until all calls queued so far are done."""
        done = threading.Event()
        self.submit(done.set)
        done.wait()

    def close(self) -> None:
        """End the thread after the queued calls; later ones are not executed."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                # Imported here: most stubs never log.
                import logging  # noqa: PLC0415

                logging.getLogger(__name__).exception("a call of the driver failed")
            # It may have the last reference to some memory.
            del work


def handle_bytes(handle: Any) -> bytes:
    """Return the 64 bytes of a handle for another process."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_from(kind: str, raw: bytes) -> Any:
    """Return a handle of the driver's type ``kind`` from 64 bytes; INVALID_ARG for another number."""
    if len(raw) != HANDLE_BYTES:
        raise invalid(
            f"expected a CUDA IPC handle of {HANDLE_BYTES} bytes, got {len(raw)}; send the raw "
            "handle as the driver gives it"
        )
    handle = getattr(load(), kind)()
    ctypes.memmove(handle.getPtr(), raw, HANDLE_BYTES)
    return handle


def import_bindings() -> Any:
    """Return the module ``cuda.bindings.driver``, without ``cuInit``; DriverAbsent if it is not usable."""
    try:
        import cuda.bindings as bindings  # noqa: PLC0415
        from cuda.bindings import driver  # noqa: PLC0415  (loads libcuda: only when asked)
    except ImportError as error:
        raise DriverAbsent(
            f"cuda-python cannot be imported ({error}): pip install 'gpubridge[gpu]'"
        ) from error
    version = str(getattr(bindings, "__version__", "0"))
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST_BINDINGS:
        raise DriverAbsent(
            f"cuda-python {version} is too old, as it holds the interpreter's lock while it waits "
            f"for a GPU; expected {'.'.join(map(str, _OLDEST_BINDINGS))} or newer: "
            "pip install -U 'gpubridge[gpu]'"
        )
    return driver


def _answer(name: str, arguments: tuple[object, ...]) -> Any:
    driver = _loaded if _loaded is not None else load()
    try:
        return getattr(driver, name)(*arguments)
    except RuntimeError as error:
        raise CudaError(name, _NOT_FOUND, "the driver has no such function") from error
    except (KeyError, ValueError) as error:
        # A status that is newer than the bindings.
        found = re.match(r"\d+", str(error))
        raise CudaError(name, int(found[0]) if found else _NOT_FOUND, str(error)) from error


def _failure(name: str, status: Any) -> CudaError:
    lost = int(status) == _UNKNOWN and _is_device_lost()
    return CudaError(name, int(status), status.name, lost=lost)


def _is_device_lost() -> bool:
    """Return whether nothing works on the current device any more, after one call had an unknown error.

    It may be the call's alone (a sandbox that refuses it), or stay, as on a GPU that fell off the bus.
    """
    driver = _loaded
    if driver is None or not int(driver.cuCtxGetCurrent()[1]):
        return False
    return int(driver.cuStreamQuery(_LEGACY_STREAM)[0]) in {_UNKNOWN, *_STICKY}
