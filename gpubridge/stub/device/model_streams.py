"""Order between the bridge's stream and a model's, which the model may have destroyed by then."""

from __future__ import annotations

from gpubridge.cuda_ipc import CopyStream, CudaError
from gpubridge.cuda_ipc.driver import call

__all__ = ["follow", "precede"]


def follow(copies: CopyStream, stream: int) -> None:
    """Let what follows on the bridge's stream wait for all that a model's has to do now."""
    try:
        copies.order_after(stream)
    except CudaError as error:
        if error.sticky:
            raise
        # What it had to do can only be waited for.
        call("cuCtxSynchronize")


def precede(copies: CopyStream, stream: int) -> None:
    """Let what follows on a model's stream wait for all that the bridge's has to do now."""
    try:
        copies.order_before(stream)
    except CudaError as error:
        # Nothing follows on it any more.
        if error.sticky:
            raise
