"""Lets PyTorch and CuPy make tensors in the instance's arena, from where no copy need be sent.

Neither is imported here: only a library that the model has imported is asked for anything.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError
from gpubridge.pb_utils import host
from gpubridge.pb_utils.arguments import integer
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.logger import Logger
from gpubridge.tensor.native import absence, native, native_path
from gpubridge.tensor.streams import LEGACY_STREAM

if TYPE_CHECKING:
    from gpubridge.pb_utils.device_memory import DeviceMemory
    from gpubridge.tensor.device_bytes import DeviceBytes

_RESERVE = 64 << 20


@contextlib.contextmanager
def device_arena(reserve: int = _RESERVE) -> Iterator[None]:
    """Have tensors that this thread makes in the block lie in the GPU memory of the instance.

    ``Tensor.from_dlpack()`` of such a tensor is handed to other models on the GPU as it is; any other
    is copied there first. Works for PyTorch (with ``torch.cuda.use_mem_pool``) and CuPy where the
    model has imported them. Does nothing where the model's instance has no GPU. Everything that is allocated in the
    block takes room in the arena, so put the last step of a model in it, not all. This is
    gpubridge's own.

    Parameters
    ----------
    reserve : int, optional
        Bytes of the arena that PyTorch gets, from its first use in the process on; it makes blocks
        of 2 or 20 MiB of them, or larger ones for larger tensors, and keeps them. CuPy takes what
        it needs.

    Raises
    ------
    TypeError
        If `reserve` is no positive int.
    TritonModelException
        If the arena has no room: for the reserve, or for a tensor in the block.
    """
    reserve = integer(reserve, "reserve", least=1)
    around = host.current()
    memory = None if around is None else around.device
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
    """Gives CuPy a slot of the arena for each array."""

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
    """PyTorch's pool of memory that the compiled module cuts from a part of the arena.

    PyTorch holds locks that threads with the GIL wait for while it asks: no Python may run then.
    """

    def __init__(self, torch: Any, memory: DeviceMemory, reserve: int) -> None:
        compiled = native()
        assert compiled is not None  # the caller has looked
        self._torch = torch
        self._compiled = compiled
        self.memory = memory
        self._reserve = reserve
        # Held for as long as the process lives: PyTorch keeps what it has got.
        self._data = _reserved(memory, reserve)
        compiled.arena_set(self._data.pointer, self._data.nbytes)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            native_path(), "gpubridge_arena_malloc", "gpubridge_arena_free"
        )
        self._pool = torch.cuda.MemPool(allocator.allocator())
        # The pool only points to it, and gives its memory back when it goes: it goes first.
        self._allocator = allocator

    def obstacle(self) -> str | None:
        """Say why PyTorch makes no tensors in it; None if it does, as far as there is room.

        With ``expandable_segments`` a release refuses pools that are not its own, or goes round them.
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
            said = "it makes them elsewhere"
        self._compiled.arena_set(0, 0)
        return (
            f"PyTorch {self._torch.__version__} does not use its pool: {said}; take "
            "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or a newer PyTorch"
        )

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have this thread's tensors made in the pool."""
        # What was refused before was made room for.
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
    """Return this process's pool, tried at the first call; None where PyTorch cannot have one."""
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
    # PyTorch orders its streams among themselves, and they are not known here.
    data.shared = True
    return data
