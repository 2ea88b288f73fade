"""Rows of the GPU benchmark, each at several sizes."""

from __future__ import annotations

from dataclasses import dataclass

from gpubridge.bench.device_requests import Way

__all__ = ["FLAT", "FLAT_FROM", "ROWS", "SMALL", "GpuRow"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

FLAT = 1.2
"""Largest ratio of the slowest size's time to the fastest's in a flat row."""
FLAT_FROM = _MIB
"""Smaller tensors have no say in whether a row is flat."""
SMALL = _MIB
"""The largest size of a smoke run."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One kind of work.

    Attributes
    ----------
    model : str
        Of benchmarks/models/gpu.
    way : Way, optional
        Where a request's tensors are; None for work that is between models.
    sizes : tuple of int
        Bytes of a tensor.
    copied : int
        How often the bridge copies the tensor's bytes on the device: the limit is so many copies.
    compared : bool
        Whether Triton can do the same with the same model.
    checked : bool
        Whether the answer is the input.
    flat : bool
        Whether the time should not depend on the size.
    minimum : tuple of (int, float), optional
        A size, and how many times faster than Triton gpubridge is to be there.
    """

    name: str
    title: str
    model: str
    way: Way | None
    sizes: tuple[int, ...]
    copied: int = 0
    compared: bool = True
    checked: bool = True
    flat: bool = False
    minimum: tuple[int, float] | None = None


ROWS = (
    GpuRow(
        "cuda_shm_identity",
        "CUDA shared memory in and out, the model's own tensor",
        "gpu_identity",
        Way.REGIONS,
        (64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB, _GIB),
        copied=1,
        minimum=(64 * _MIB, 3.0),
    ),
    GpuRow(
        "cuda_shm_place",
        "CUDA shared memory in and out, request.output, the bridge alone",
        "gpu_place",
        Way.REGIONS,
        (64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB, _GIB),
        compared=False,
        checked=False,
        flat=True,
    ),
    GpuRow(
        "network",
        "HTTP in and out, the model's tensors on the GPU",
        "gpu_upload",
        Way.NETWORK,
        (_MIB, 64 * _MIB),
        compared=False,
    ),
    GpuRow(
        "ensemble",
        "ensemble of two models on the GPU, CUDA shared memory in and out",
        "gpu_chain",
        Way.REGIONS,
        (_MIB, 64 * _MIB),
        copied=2,
    ),
    GpuRow(
        "call_48",
        "call of another model with 48 tensors on the GPU, 64 KiB each, and back",
        "gpu_call_48",
        None,
        (64 * _KIB,),
    ),
)
