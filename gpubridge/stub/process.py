"""A stub's life: initialize on the server's word, execute until told to finalize, exit."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError, invalid
from gpubridge.host_shm import Segment
from gpubridge.pb_utils import InferenceRequest, InferenceResponse, Tensor, host
from gpubridge.pb_utils.logger import Logger
from gpubridge.pb_utils.request_fields import InferenceTrace
from gpubridge.stub.answers import ModelIdentity
from gpubridge.stub.bls_client import BlsClient
from gpubridge.stub.client_memory import ClientMemory
from gpubridge.stub.executor import Executor
from gpubridge.stub.forked import ForkedCalls
from gpubridge.stub.limits import LIMITS
from gpubridge.stub.loader import (
    answer_readiness,
    completed_config,
    load_model,
    model_error_text,
    wait_for_debugger,
)
from gpubridge.stub.metrics import MetricDesk
from gpubridge.stub.outputs import OutputMemory
from gpubridge.stub.results import ResultSender
from gpubridge.stub.states import SequenceStates
from gpubridge.stub.uploading import BatchesAhead, UploadingExecutor
from gpubridge.tensor.native import NativeStubLoop, absence, native
from gpubridge.transport.channel import Channel, ChannelClosed, MalformedMessage
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory, is_read_only
from gpubridge.transport.messages import (
    Batch,
    Completes,
    Kind,
    comes_alone,
    control_message,
    decode_control,
    decode_execute,
    shortened,
)
from gpubridge.transport.records import RecordReader, record_reader
from gpubridge.transport.short_waits import ShortWaits, busy_poll_ns
from gpubridge.transport.signatures import parse_signature

if TYPE_CHECKING:
    from gpubridge.stub.device.memory import StubDevice
    from gpubridge.stub.device.pinning import HostPinning

_SERVER = 0
_AWAKE_SHARE = 4
"""A stub stays awake for a part of the time that the server does: the client needs a processor.

For twice as long where another model has asked, which does something itself before it asks again.
"""


class Stub:
    """Wires a stub's parts together and answers the server's messages.

    ``settings`` are the fields of the INITIALIZE message, ``fds`` its descriptors; ``note`` is told
    of what the model raises, while its traceback is still there.
    """

    def __init__(
        self,
        channel: Channel,
        settings: dict[str, Any],
        fds: Sequence[int],
        note: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._note = note
        self._channel = channel
        self._settings = settings
        segment = Segment.open(0, fds[0], ControlPage.SIZE)
        self._control = ControlPage(segment)
        self._borrowed = BorrowedMemory(self._control.lent)
        self._outputs = OutputMemory(
            settings["owner"],
            settings["output_limit"],
            self._control.outputs,
            self._announce,
            self._withdraw,
        )
        self._forked = ForkedCalls()
        os.register_at_fork(
            before=self._forked.before_fork,
            after_in_parent=self._forked.after_in_parent,
            after_in_child=self._detach,
        )
        self._reader = record_reader(RequestContext)
        # Where messages come from, and what takes those with batches apart.
        self._incoming: Channel | BatchesAhead = channel
        self._decode: Callable[[bytes, RecordReader], list[Batch]] = decode_execute
        self._results = ResultSender(channel, self._control)
        awake_ns = busy_poll_ns(settings["busy_poll_us"])
        self._awake_ns = awake_ns // _AWAKE_SHARE
        self._waits = ShortWaits(_AWAKE_SHARE * self._awake_ns)
        calls = socket.socket(fileno=fds[1])
        calls.setblocking(False)
        self._device: StubDevice | None = None
        # The number by which this process knows its GPU, where the server may know it by another.
        self._device_id = ""
        # Where the memory of requests is pinned, if inputs are copied from there to the GPU.
        self._uploads: HostPinning | None = None
        self._calls = BlsClient(
            Channel(calls), self._control.lent, self._outputs, self._waits, awake_ns
        )
        self._clients: ClientMemory | None = None
        self._metrics = MetricDesk(self._calls, settings["instance"])
        self._model: Any = None
        self._loop: NativeStubLoop | None = None
        self._executor: Executor | None = None

    def initialize(self) -> bool:
        """Load the model and call its ``initialize``; tells the server how it went."""
        settings = self._settings
        try:
            self._find_device()
            self._attach(None)
            if "debug_port" in settings:
                wait_for_debugger(settings["instance"], settings["debug_port"])
            kind = load_model(settings["path"], _package(settings))
            if settings["completion"]:
                self._configure(kind)
            specs = settings["states"]
            states = SequenceStates(specs, settings["batched"]) if specs else None
            model = kind()
            if hasattr(model, "initialize"):
                model.initialize(self._arguments(settings["args"]))
            if not callable(getattr(model, "execute", None)):
                raise invalid(
                    f"Python model {settings['path']} does not implement `execute` method."
                )
            self._executor = executor = self._make_executor(model, states)
            readiness = answer_readiness(model, executor.run_coroutine)
        except BaseException as error:
            if self._note is not None:
                self._note(error)
            text = error.message if isinstance(error, BridgeError) else model_error_text(error)
            self._channel.send(control_message(Kind.FAILED, error=shortened(text)))
            return False
        self._model = model
        if self._device is None:
            # Before the collector is told to freeze what exists.
            self._loop = self._compiled_loop(executor)
        self._attach(self._calls)
        absent = absence()
        if absent is not None:
            self._fall_back("native_module", f"it runs slower: {absent}", int(Logger.INFO))
        # What exists now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self._channel.send(
            control_message(Kind.READY),
            () if readiness is None else (readiness.fileno(),),
        )
        if readiness is not None:
            readiness.close()
        return True

    def _compiled_loop(self, executor: Executor) -> NativeStubLoop | None:
        """Make what executes plain batches by itself; None where there is no compiled module."""
        compiled = native()
        if compiled is None:
            return None
        loop = compiled.StubLoop(
            self._channel,
            executor,
            self._outputs,
            self._control,
            self._waits,
            executor.book,
            (Tensor, InferenceRequest, InferenceResponse, InferenceTrace._of),
            (self._reader, parse_signature, executor.identity.check, decode_execute, Batch),
            self._awake_ns,
            LIMITS,
        )
        self._outputs.spare = loop.give_back
        executor.use(loop)
        return loop

    def _arguments(self, args: dict[str, str]) -> dict[str, str]:
        """Return what ``initialize`` gets: of the GPU, the number by which libraries here know it."""
        return {
            **args,
            "model_instance_device_id": self._device_id or args["model_instance_device_id"],
        }

    def _find_device(self) -> None:
        """Find out whether this process can have its model's GPU; it has nothing there before need."""
        told = self._settings.get("device")
        if told is None:
            return
        # Most stubs have no GPU, and load nothing of it.
        from gpubridge.cuda_ipc import bindings_absence, find_device, visibility  # noqa: PLC0415
        from gpubridge.stub.device.memory import StubDevice  # noqa: PLC0415

        reason = bindings_absence()
        if reason:
            text = f"tensors stay in host memory, since the GPU cannot be used: {reason}"
            self._fall_back("device_absent", text)
            self._tell_no_device()
            return
        if told["visible"] != visibility():
            self._device_id = str(find_device(told["uuid"]).ordinal)
        work, cells = self._control.device_work, self._control.events
        self._device = device = StubDevice(
            told,
            self._settings["owner"],
            work,
            cells,
            self._calls.ask,
            self._tell_closed,
            self._tell_no_device,
            self._fall_back,
        )
        device.reclaim = self._outputs.reclaim
        device.know_own_in(self._borrowed)
        if self._settings["input_placement"] == "device":
            self._uploads = device.pinning

    def _make_executor(self, model: Any, states: SequenceStates | None) -> Executor:
        identity = ModelIdentity(self._settings, self._note, self._warn_once)
        self._clients = ClientMemory(
            self._borrowed,
            self._control,
            self._settings["input_sharing"],
            identity.name,
            identity.instance,
            self._fall_back,
            self._device,
        )
        parts = (
            model,
            identity,
            self._outputs,
            self._control,
            self._results,
            self._clients,
            states,
            self._fall_back,
        )
        if self._device is None:
            return Executor(*parts, None, None)
        from gpubridge.stub.device.inputs import DeviceInputs  # noqa: PLC0415
        from gpubridge.stub.device.inputs_ahead import InputsAhead  # noqa: PLC0415
        from gpubridge.stub.device.placement import DevicePlacement  # noqa: PLC0415

        placement = DevicePlacement(self._outputs, self._device, self._clients)
        self._calls.use_device(self._device, placement)
        where = self._settings["input_placement"]
        if where != "device" or identity.iterative:
            inputs = DeviceInputs(self._device, where, self._fall_back)
            return Executor(*parts, inputs, placement)
        inputs_ahead = InputsAhead(self._device, self._fall_back, self._borrowed)
        self._incoming = ahead = BatchesAhead(self._channel, self._reader, self._map)
        self._decode = ahead.batches
        return UploadingExecutor((*parts, inputs_ahead, placement), inputs_ahead, ahead)

    def _configure(self, kind: Any) -> None:
        """Wait for the settings of the completed configuration, having completed it if asked to."""
        settings = self._settings
        if settings["completion"] == Completes.HERE:
            text = completed_config(kind, settings["name"], settings["args"]["model_config"])
            self._channel.send(control_message(Kind.COMPLETED, config=text))
        message, _ = self._channel.receive()
        if message[0] != Kind.CONFIGURE:
            raise MalformedMessage(
                f"expected the configuration, got a message of kind {message[0]}"
            )
        settings.update(decode_control(message))

    def serve(self) -> int:
        """Answer messages until told to finalize or the server is gone; returns the exit code."""
        channel, clients = self._incoming, self._clients
        assert clients is not None
        wait_ns = 0
        while True:
            if wait_ns:
                channel.poll(wait_ns, self._waits)
            lost = None if clients.device is None else clients.device.settle_until(channel.wait)
            if lost is not None:
                # Even with nothing to do: others may wait for what it has handed on.
                return self._give_up(lost)
            message, fds = channel.receive() if self._loop is None else self._next_message()
            kind = message[0]
            if kind == Kind.EXECUTE:
                wait_ns = self._run_batches(message)
            elif kind in (Kind.REGION, Kind.DEVICE_REGION, Kind.PIN):
                self._map(message, fds)
            elif kind == Kind.DROP_REGION:
                self._drop(decode_control(message)["region"], clients)
            elif kind == Kind.TRIM:
                self._outputs.trim(decode_control(message)["idle_seconds"])
                self._calls.catch_up()
                clients.settle()
            elif kind == Kind.DEVICE_ALONE:
                assert clients.device is not None
                clients.device.keep_alone(decode_control(message)["reason"])
            elif kind == Kind.FINALIZE:
                return self._finalize()
            else:
                raise MalformedMessage(f"message of unknown kind {kind} from the server")

    def _next_message(self) -> tuple[bytes, list[int]]:
        """Let the compiled loop execute batches until something else comes."""
        assert self._loop is not None
        try:
            return self._loop.next_message()
        except OSError as error:
            raise ChannelClosed from error

    def _map(self, message: bytes, fds: list[int]) -> None:
        """Map a region, or pin one, or begin to open one on the GPU.

        Requests that name memory which cannot be mapped are refused.
        """
        fields = decode_control(message)
        if message[0] == Kind.PIN:
            self._pin(fields)
            return
        if message[0] == Kind.REGION:
            assert self._clients is not None
            memory = self._clients if fields["client"] else self._borrowed
            region = fields["region"]
            memory.announce(region, fds.pop(), fields["size"])
            # Of its own model's memory the server says what is in use; what is only read stays as it is.
            theirs = region >> 32 != _SERVER and not is_read_only(region)
            if self._uploads and theirs and memory is self._borrowed:
                self._uploads.add(memory.segment(region), 0, fields["size"])
            return
        assert self._device is not None
        self._borrowed.know(self._device.regions.announce(fields, fds))

    def _pin(self, fields: dict[str, Any]) -> None:
        """Pin a range of the memory of the model's requests, if inputs are copied from there."""
        if self._uploads:
            segment = self._borrowed.segment(fields["region"])
            self._uploads.add(segment, fields["offset"], fields["nbytes"])

    def _drop(self, region: int, clients: ClientMemory) -> None:
        """Unmap a region, views of it that exist excepted."""
        self._borrowed.drop(region)
        clients.drop(region)
        if self._device is not None:
            self._device.pinning.remove(region)
            self._device.settle()

    def _run_batches(self, message: bytes) -> int:
        """Execute the batches of a message; returns for how long (ns) to stay awake for the next."""
        waits = self._waits
        waits.end(time.monotonic_ns())
        waits.alone = comes_alone(message)
        executor = self._executor
        assert executor is not None
        batches = self._decode(message, self._reader)
        last = len(batches) - 1
        for i, batch in enumerate(batches):
            result = executor.run(batch)
            lost = self._device is not None and self._device.lost is not None
            self._results.add(
                result, self._control.started_at, executor.ended_at, lost or i == last
            )
            if lost:
                # The others have not started: another stub gets them.
                break
        # Not before: somebody waits for what was sent.
        self._outputs.reclaim()
        if not waits.begin(time.monotonic_ns()):
            return 0
        called = any(each.context.outputs_for for batch in batches for each in batch.records)
        return 2 * self._awake_ns if called else self._awake_ns

    def _give_up(self, error: BridgeError) -> int:
        """End the process: nothing of its GPU works in it any more, and in another it will."""
        text = f"the stub ends, to be started again: {error.message}"
        self._log(int(Logger.ERROR), text, __file__, 0)
        return 1

    def _finalize(self) -> int:
        executor = self._executor
        self._attach(None)
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except BaseException as error:
            if self._note is not None:
                self._note(error)
            self._log(2, model_error_text(error), "finalize", 0)
        if executor is not None:
            executor.close()
        self._metrics.close()
        if self._device is not None:
            self._device.close()
        self._channel.send(control_message(Kind.FINALIZED))
        return 0

    def _attach(self, caller: BlsClient | None) -> None:
        """Say what the model may ask of this process."""
        folder, instance = self._settings["model_dir"], self._settings["instance"]
        ask, device = self._calls.ask, self._device
        host.attach(host.Host(folder, self._log, caller, self._metrics, ask, device, instance))

    def _detach(self) -> None:
        """In a child that the model forked: leave what is shared with the server alone."""
        self._control.detach()
        self._borrowed.forget(self._control.lent)
        self._outputs.disown()
        self._results.disown()
        if self._loop is not None:
            self._loop.disown()
        self._metrics.disown()
        self._forked.after_in_child()
        around = host.current()
        if around is not None:
            host.attach(around._replace(caller=self._forked, device=None))

    def _announce(self, segment: Segment) -> None:
        if self._device is not None:
            self._device.pinning.add(segment, 0, segment.size)
        self._channel.send(
            control_message(
                Kind.REGION, region=segment.region, size=segment.size, home=segment.home
            ),
            (segment.fd,),
        )

    def _tell_closed(self, region: int, announcements: int) -> None:
        self._channel.send(
            control_message(Kind.REGION_CLOSED, region=region, announcements=announcements)
        )

    def _tell_no_device(self) -> None:
        self._channel.send(control_message(Kind.NO_DEVICE))

    def _withdraw(self, segment: Segment) -> None:
        if self._device is not None:
            self._device.pinning.remove(segment.region)
        self._channel.send(control_message(Kind.DROP_REGION, region=segment.region))

    def _fall_back(self, reason: str, text: str, level: int = int(Logger.WARNING)) -> None:
        """Log that a slower way is taken, and have it counted whatever is logged."""
        fields = {"level": level, "text": text, "file": __file__, "line": 0}
        once = reason if reason == "native_module" else ""
        self._channel.send(control_message(Kind.LOG, fallback=reason, once=once, **fields))

    def _warn_once(self, name: str, text: str) -> None:
        """Log what is wrong with an output, unless another process of the model has."""
        fields = {
            "level": int(Logger.WARNING),
            "text": shortened(text),
            "file": __file__,
            "line": 0,
        }
        self._channel.send(control_message(Kind.LOG, once=name, **fields))

    def _log(self, level: int, text: str, file: str, line: int) -> None:
        if not self._control.log_levels >> level & 1:
            return
        fields = {"level": level, "text": shortened(text), "file": file, "line": line}
        try:
            self._channel.send(control_message(Kind.LOG, **fields))
        except BridgeError:
            sys.stderr.write(text + "\n")


def _package(settings: dict[str, Any]) -> str:
    """Return the package that a model's file is imported into; none for the file of a backend."""
    return str(settings["version"]) if settings["backend"] == "python" else ""
