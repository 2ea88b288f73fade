"""The compiled loop of a stub, which executes plain batches by itself; where the module is there."""

from __future__ import annotations

from gpubridge.pb_utils import InferenceRequest, InferenceResponse, Tensor
from gpubridge.pb_utils.request_fields import InferenceTrace
from gpubridge.stub.executor import Executor
from gpubridge.stub.limits import LIMITS
from gpubridge.stub.outputs import OutputMemory
from gpubridge.tensor.native import NativeStubLoop, native
from gpubridge.transport.channel import Channel
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.messages import Batch, decode_execute
from gpubridge.transport.records import record_reader
from gpubridge.transport.short_waits import ShortWaits
from gpubridge.transport.signatures import encode_signature, parse_signature


def compiled_loop(
    channel: Channel,
    executor: Executor,
    outputs: OutputMemory,
    control: ControlPage,
    waits: ShortWaits,
    awake_ns: int,
) -> NativeStubLoop | None:
    """Make the loop of a stub that has no GPU; None where there is no compiled module.

    - ``channel``: to the server; read by the loop from now on.
    - ``executor``: runs the batches that are not plain.
    - ``outputs``: where responses are placed; the loop reserves some of it for small ones.
    - ``waits``: judges whether to stay awake, for `awake_ns` nanoseconds.
    """
    compiled = native()
    if compiled is None:
        return None
    loop = compiled.StubLoop(
        channel,
        executor,
        outputs,
        control,
        waits,
        executor.book,
        (Tensor, InferenceRequest, InferenceResponse, InferenceTrace._of),
        (record_reader(RequestContext), parse_signature, encode_signature, decode_execute, Batch),
        awake_ns,
        LIMITS,
    )
    outputs.spare = loop.give_back
    executor.use(loop)
    return loop
