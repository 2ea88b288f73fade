"""`device_arena`: PyTorch and CuPy allocate tensors in the instance's arena, which are sent uncopied.

This module imports neither library; it uses only those that the model has imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.exceptions import TritonModelException, integer
from gpubridge.pb_utils.logger import Logger
from gpubridge.tensor.native import absence, native, native_path
from gpubridge.tensor.streams import LEGACY_STREAM

if TYPE_CHECKING:
    from gpubridge.pb_utils.host import DeviceMemory
    from gpubridge.tensor.device_bytes import DeviceBytes

_RESERVE = 64 << 20


@contextlib.contextmanager
def device_arena(reserve: int = _RESERVE) -> Iterator[None]:
    """Allocate the tensors that this thread makes in the block in the instance's GPU memory.

    ``Tensor.from_dlpack()`` of such a tensor reaches other models on the GPU without a copy; other
    tensors are copied to that memory first. Works for PyTorch (with ``torch.cuda.use_mem_pool``) and
    CuPy where the model has imported them. Does nothing where the model's instance has no GPU. All
    allocations in the block take memory of the arena: enclose only the last step of a model. This
    is an extension of gpubridge.

    Parameters
    ----------
    reserve : int, optional
        Bytes of the arena that PyTorch gets at its first use in the process and keeps; it divides
        them into blocks of 2 or 20 MiB, or larger ones for larger tensors. CuPy allocates as needed.

    Raises
    ------
    TypeError
        If `reserve` is not a positive int.
    TritonModelException
        If the arena is full: for the reserve, or for a tensor in the block.
    """
    reserve = integer(reserve, "reserve", least=1)
    server = host.current()
    memory = None if server is None else server.device
    if memory is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            stack.enter_context(cupy.cuda.using_allocator(_CupyAllocator(cupy, memory)))
        torch = sys.modules.get("torch")
        pool = None if torch is None else _torch_pool(torch, memory, reserve)
        if pool is not None:
            stack.enter_context(pool.used())
        yield


class _CupyAllocator:
    """CuPy allocator that takes a slot of the arena for each array."""

    def __init__(self, cupy: Any, memory: DeviceMemory) -> None:
        self._cupy = cupy
        self._memory = memory

    def __call__(self, size: int) -> Any:
        cuda = self._cupy.cuda
        ordinal = self._memory.ordinal
        if cuda.Device().id != ordinal:
            return self._cupy.get_default_memory_pool().malloc(size)
        pointer, data = 0, None
        if size:
            try:
                data = self._memory.allocate_device(size)
                data.hand_out(cuda.get_current_stream().ptr or LEGACY_STREAM)
            except BridgeError as error:
                raise TritonModelException(error.message) from None
            pointer = data.pointer
        return cuda.MemoryPointer(cuda.UnownedMemory(pointer, size, data, ordinal), 0)


class _TorchPool:
    """PyTorch memory pool whose blocks the compiled module allocates in a part of the arena.

    PyTorch calls the allocator under locks that threads with the GIL wait for: no Python may run
    there.
    """

    def __init__(self, torch: Any, memory: DeviceMemory, reserve: int) -> None:
        compiled = native()
        assert compiled is not None  # _obstacle() has checked
        self._torch = torch
        self._compiled = compiled
        self.memory = memory
        self._reserve = reserve
        # Kept for as long as the process lives, since PyTorch keeps its blocks.
        self._data = _reserved(memory, reserve)
        compiled.arena_set(self._data.pointer, self._data.nbytes)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            native_path(), "gpubridge_arena_malloc", "gpubridge_arena_free"
        )
        self._pool = torch.cuda.MemPool(allocator.allocator())
        # The pool only points to the allocator and frees memory when it is deleted: it goes first.
        self._allocator = allocator

    def obstacle(self) -> str | None:
        """Return why PyTorch does not allocate in the pool; None if it does.

        With ``expandable_segments``, some releases refuse foreign pools, and some ignore them.
        """
        device = self.memory.ordinal
        try:
            with self._torch.cuda.use_mem_pool(self._pool, device=device):
                tried = self._torch.empty(1, dtype=self._torch.uint8, device=f"cuda:{device}")
        except RuntimeError as error:
            if self._compiled.arena_state()[1]:
                return None
            said = str(error).partition("\n")[0]
        else:
            offset = tried.data_ptr() - self._data.pointer
            if 0 <= offset < self._data.nbytes:
                return None
            said = "it allocates elsewhere"
        self._compiled.arena_set(0, 0)
        return (
            f"PyTorch {self._torch.__version__} does not use its pool: {said}; take "
            "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or a newer PyTorch"
        )

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Allocate this thread's tensors in the pool within the block."""
        # Forgets sizes that were refused earlier.
        self._compiled.arena_state()
        try:
            with self._torch.cuda.use_mem_pool(self._pool, device=self.memory.ordinal):
                yield
        except Exception as error:
            in_use, refused = self._compiled.arena_state()
            if not refused or type(error).__name__ != "OutOfMemoryError":
                raise
            raise TritonModelException(
                f"device_arena(): PyTorch asked for {refused} bytes more, {in_use} of the "
                f"{self._reserve} that it has of the arena are in use; give it more with "
                "device_arena(reserve=N), or make fewer tensors in the block"
            ) from error


_pool_lock = threading.Lock()
_pool: _TorchPool | None = None
_refused = False


def _torch_pool(torch: Any, memory: DeviceMemory, reserve: int) -> _TorchPool | None:
    """Return this process's pool, made at the first call; None where PyTorch cannot use one."""
    global _pool, _refused  # noqa: PLW0603  (one process, one pool)
    with _pool_lock:
        if _refused or (_pool is not None and _pool.memory is memory):
            return _pool
        _pool = None
        reason = _obstacle(torch)
        if reason is None:
            made = _TorchPool(torch, memory, reserve)
            reason = made.obstacle()
            _pool = made if reason is None else None
        if reason is not None:
            _refused = True
            Logger.log_warn(f"device_arena(): PyTorch's tensors are copied there, since {reason}")
        return _pool


def _obstacle(torch: Any) -> str | None:
    if not torch.cuda.is_available():
        return "this PyTorch has no CUDA"
    if not hasattr(torch.cuda, "use_mem_pool"):
        return f"PyTorch {torch.__version__} has no torch.cuda.use_mem_pool; newer ones have"
    missing = absence()
    return None if missing is None else f"its allocator needs the compiled module: {missing}"


def _reserved(memory: DeviceMemory, nbytes: int) -> DeviceBytes:
    try:
        data = memory.allocate_device(nbytes)
        data.complete()
    except BridgeError as error:
        raise TritonModelException(error.message) from None
    # PyTorch orders its own streams, which are not known here.
    data.shared = True
    return data
