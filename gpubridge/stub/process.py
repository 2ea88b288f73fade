"""A stub's process: loads and initializes its model, executes batches, finalizes the model."""

from __future__ import annotations

import errno
import gc
import os
import socket
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpubridge.errors import BridgeError, invalid
from gpubridge.host_shm import Segment
from gpubridge.parent_death import die_with
from gpubridge.pb_utils import host
from gpubridge.pb_utils.logger import Logger
from gpubridge.stub.array_batches import Executes, executes_by
from gpubridge.stub.batches import BatchRunner
from gpubridge.stub.bls.client import BlsClient
from gpubridge.stub.crash_report import report_crashes
from gpubridge.stub.error_text import model_error_text
from gpubridge.stub.executor import Executor
from gpubridge.stub.forked import ForkedCalls
from gpubridge.stub.loader import (
    answer_readiness,
    completed_config,
    load_model,
    wait_for_debugger,
)
from gpubridge.stub.memory.client_memory import ClientMemory
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.stub.memory.states import SequenceStates
from gpubridge.stub.metrics import MetricClient
from gpubridge.stub.output import Output
from gpubridge.stub.response_encoder import ModelIdentity
from gpubridge.stub.uploading import UploadingExecutor
from gpubridge.tensor.native import absence
from gpubridge.transport.channel import Channel, ChannelClosed, MalformedMessage
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory, is_read_only
from gpubridge.transport.messages import (
    Completes,
    Kind,
    control_message,
    decode_control,
    shortened,
)
from gpubridge.transport.output_pieces import LogLine
from gpubridge.transport.stub_settings import (
    MemorySettings,
    StubModel,
    StubSettings,
    decode_configure,
    decode_initialize,
)
from gpubridge.transport.wait_predictor import busy_poll_ns

if TYPE_CHECKING:
    from gpubridge.stub.device.memory import StubDevice
    from gpubridge.stub.device.pinning import HostPinning

_SERVER = 0
_CLEAN_UP_SECONDS = 1.0
"""Cancelled coroutines get this time to end."""
_CLOSED_HERE = (errno.EBADF, errno.ENOTSOCK)
"""Of a descriptor that this process closed; its number may be that of a file by now."""


class ModelOutput(NamedTuple):
    """Receivers of the texts of a model.

    - ``log``: gets the lines of `Logger`, on any thread and in forked children.
    - ``note``: gets the exceptions of the model with their tracebacks.
    """

    log: Callable[[LogLine], None]
    note: Callable[[BaseException], None] | None = None


class Stub:
    """Connects a stub's parts and handles the server's messages.

    ``fds`` are the descriptors of the INITIALIZE message.
    """

    def __init__(
        self,
        channel: Channel,
        settings: StubSettings,
        memory: MemorySettings,
        fds: Sequence[int],
        output: ModelOutput,
    ) -> None:
        self._output = output
        self._channel = channel
        self._settings = settings
        self._memory = memory
        segment = Segment.open(0, fds[0], ControlPage.SIZE)
        self._control = ControlPage(segment)
        self._borrowed = BorrowedMemory(self._control.lent)
        self._outputs = OutputMemory(
            memory.owner,
            memory.output_limit,
            self._control.outputs,
            self._announce,
            self._withdraw,
        )
        self._forked = ForkedCalls()
        os.register_at_fork(
            before=_while_alive(self._forked.before_fork),
            after_in_parent=_while_alive(self._forked.after_in_parent),
            after_in_child=_while_alive(self._detach),
        )
        awake_ns = busy_poll_ns(settings.busy_poll_us)
        self._batches = BatchRunner(channel, self._control, self._outputs, awake_ns)
        calls = socket.socket(fileno=fds[1])
        calls.setblocking(False)
        self._device: StubDevice | None = None
        # The GPU's number in this process, where it may differ from the server's.
        self._device_id = ""
        self._calls = BlsClient(
            Channel(calls), self._control.lent, self._outputs, self._batches.waits, awake_ns
        )
        self._clients: ClientMemory | None = None
        self._metrics = MetricClient(self._calls, settings.instance)
        self._model: Any = None

    def hold_signals(self) -> None:
        """Keep signals from the model's handlers while the stub's code runs, in a process of its own."""
        self._batches.signals.install()

    def initialize(self) -> bool:
        """Load the model and call its ``initialize``; reports the outcome to the server."""
        settings = self._settings
        try:
            self._find_device()
            self._attach(None)
            if settings.debug_port is not None:
                wait_for_debugger(settings.instance, settings.debug_port)
            kind = load_model(settings.model.path, _package(settings.model))
            if settings.completion:
                settings = self._settings = self._completed(kind)
            specs = settings.model.states
            states = SequenceStates(specs, settings.model.batched) if specs else None
            model = kind()
            if hasattr(model, "initialize"):
                model.initialize(self._arguments(settings.arguments))
            # What follows is the stub's code.
            self._batches.signals.in_model = False
            executes = executes_by(model, settings)
            if executes is None:
                raise invalid(
                    f"Python model {settings.model.path} does not implement `execute` method."
                )
            executor = self._make_executor(executes, states)
            # A plain model's coroutines keep this thread, which then reads nothing else.
            executor.coroutines.begun = self._calls.read_on
            self._calls.waits.awaited = executor.coroutines.awaited
            self._calls.on_given_up = partial(executor.coroutines.give_up, _CLEAN_UP_SECONDS)
            readiness = answer_readiness(model, executor.coroutines.run)
        except BaseException as error:
            if self._output.note is not None:
                self._output.note(error)
            text = error.message if isinstance(error, BridgeError) else model_error_text(error)
            self._channel.send(control_message(Kind.FAILED, error=shortened(text)))
            return False
        self._model = model
        # Before _hide_from_collector(), so that it covers the loop, too.
        self._batches.serve(executor, self._borrowed, self._device)
        self._attach(self._calls)
        absent = absence()
        if absent is not None:
            self._fall_back("native_module", f"it runs slower: {absent}", int(Logger.INFO))
        self._hide_from_collector()
        self._channel.send(
            control_message(Kind.READY),
            () if readiness is None else (readiness.fileno(),),
        )
        if readiness is not None:
            readiness.close()
        return True

    def _hide_from_collector(self) -> None:
        """Have all objects of now, which live as long as the process, never scanned again."""
        gc.collect()
        gc.freeze()

    def _arguments(self, args: Mapping[str, str]) -> dict[str, str]:
        """Return the arguments of ``initialize``, with the GPU's number in this process."""
        return {
            **args,
            "model_instance_device_id": self._device_id or args["model_instance_device_id"],
        }

    @property
    def _uploads(self) -> HostPinning | None:
        """The pinning of the memory of requests, if inputs are copied from there to the GPU."""
        if self._device is None or self._settings.input_placement != "device":
            return None
        return self._device.pinning

    def _find_device(self) -> None:
        """Check whether this process can use its model's GPU; allocates nothing there yet."""
        gpu = self._memory.gpu
        if gpu is None:
            return
        # Most stubs have no GPU and do not load these modules.
        from gpubridge.cuda_ipc import bindings_absence, find_device, visibility  # noqa: PLC0415
        from gpubridge.stub.device.memory import StubDevice  # noqa: PLC0415

        reason = bindings_absence()
        if reason:
            text = f"tensors stay in host memory, since the GPU cannot be used: {reason}"
            self._fall_back("device_absent", text)
            self._tell_no_device()
            return
        if gpu.visible != visibility():
            self._device_id = str(find_device(gpu.uuid).ordinal)
        work, cells = self._control.device_work, self._control.events
        self._device = device = StubDevice(
            gpu,
            self._memory.owner,
            work,
            cells,
            self._calls.ask,
            self._tell_closed,
            self._tell_no_device,
            self._fall_back,
        )
        device.reclaim_slots = self._outputs.reclaim
        device.add_lease_book(self._borrowed)

    def _make_executor(self, model: Executes, states: SequenceStates | None) -> Executor:
        identity = ModelIdentity(self._settings, self._output.note, self._warn_once)
        self._clients = ClientMemory(
            self._borrowed,
            self._control,
            self._settings.input_sharing,
            identity.name,
            identity.instance,
            self._fall_back,
            self._device,
        )
        parts = (
            model,
            self._batches.signals,
            identity,
            self._outputs,
            self._control,
            self._batches.results,
            self._clients,
            states,
            self._fall_back,
        )
        if self._device is None:
            return Executor(*parts, None, None)
        from gpubridge.stub.device.input_prefetch import InputPrefetcher  # noqa: PLC0415
        from gpubridge.stub.device.inputs import DeviceInputs  # noqa: PLC0415
        from gpubridge.stub.device.placement import DevicePlacement  # noqa: PLC0415

        placement = DevicePlacement(self._outputs, self._device, self._clients)
        self._calls.use_device(self._device, placement)
        where = self._settings.input_placement
        if where != "device" or identity.iterative:
            inputs = DeviceInputs(self._device, where, self._fall_back)
            return Executor(*parts, inputs, placement)
        input_prefetch = InputPrefetcher(self._device, self._fall_back, self._borrowed)
        ahead = self._batches.look_ahead(self._map)
        return UploadingExecutor((*parts, input_prefetch, placement), input_prefetch, ahead)

    def _completed(self, kind: Any) -> StubSettings:
        """Complete the configuration if required, and wait for the resulting settings."""
        settings = self._settings
        if settings.completion == Completes.HERE:
            config = settings.arguments["model_config"]
            text = completed_config(kind, settings.model.name, config)
            self._channel.send(control_message(Kind.COMPLETED, config=text))
        message, _ = self._channel.receive()
        if message[0] != Kind.CONFIGURE:
            raise MalformedMessage(
                f"expected the configuration, got a message of kind {message[0]}"
            )
        return decode_configure(message)

    def serve(self) -> int:
        """Handle messages until FINALIZE or the end of the channel; returns the exit code."""
        clients = self._clients
        assert clients is not None
        while True:
            message, fds = self._batches.receive(self._device, self._report_loss)
            if not message:
                # Also when idle: other processes may wait for tensors of this one.
                return 1
            kind = message[0]
            if kind == Kind.EXECUTE:
                self._batches.run(message)
            elif kind in (Kind.REGION, Kind.DEVICE_REGION, Kind.PIN):
                self._map(message, fds)
            elif kind == Kind.DROP_REGION:
                self._drop(decode_control(message)["region"], clients)
            elif kind == Kind.TRIM:
                self._outputs.trim(decode_control(message)["idle_seconds"])
                self._calls.catch_up()
                clients.settle()
            elif kind == Kind.CANCEL:
                self._batches.note_cancelled(decode_control(message)["ticket"])
            elif kind == Kind.DEVICE_ALONE:
                assert clients.device is not None
                clients.device.stop_sharing(decode_control(message)["reason"])
            elif kind == Kind.FINALIZE:
                return self._finalize()
            else:
                raise MalformedMessage(f"message of unknown kind {kind} from the server")

    def drop(self) -> None:
        """Let the garbage collector find this stub's objects: for a process that outlives it."""
        self._batches.drop_loop()
        self._calls.close()

    def _report_loss(self, error: str) -> None:
        text = f"the stub ends, to be started again: {error}"
        self._log(int(Logger.ERROR), text, __file__, 0)

    def _map(self, message: bytes, fds: list[int]) -> None:
        """Map or pin a region, or begin to open one on the GPU.

        Requests that refer to memory which cannot be mapped are refused.
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
            # PIN messages name the ranges of the model's own memory; read-only memory is not pinned.
            theirs = region >> 32 != _SERVER and not is_read_only(region)
            if self._uploads and theirs and memory is self._borrowed:
                self._uploads.add(memory.segment(region), 0, fields["size"])
            return
        assert self._device is not None
        self._device.use()
        self._borrowed.add_segment(self._device.regions.announce(fields, fds))

    def _pin(self, fields: dict[str, Any]) -> None:
        """Pin a range of the memory of the model's requests, if inputs are copied from there."""
        if self._uploads:
            segment = self._borrowed.segment(fields["region"])
            self._uploads.add(segment, fields["offset"], fields["nbytes"])

    def _drop(self, region: int, clients: ClientMemory) -> None:
        """Unmap a region; existing views keep it mapped."""
        self._borrowed.drop(region)
        clients.drop(region)
        if self._device is not None:
            self._device.pinning.remove(region)
            self._device.reclaim()

    def _finalize(self) -> int:
        # Of requests that the server gives up.
        self._batches.cancel(_CLEAN_UP_SECONDS)
        self._attach(None)
        try:
            if hasattr(self._model, "finalize"):
                self._batches.signals.call(self._model.finalize)
        except BaseException as error:
            if self._output.note is not None:
                self._output.note(error)
            self._log(2, model_error_text(error), "finalize", 0)
        # After `finalize`, which may end the model's tasks in its own way.
        self._batches.close(_CLEAN_UP_SECONDS)
        self._metrics.close()
        if self._device is not None:
            self._device.close()
        self._channel.send(control_message(Kind.FINALIZED))
        return 0

    def _attach(self, caller: BlsClient | None) -> None:
        """Attach the services for pb_utils; ``caller`` is None while the model may make no calls."""
        folder, instance = self._settings.model.directory, self._settings.instance
        ask, device = self._calls.ask, self._device
        record, metrics = self._record_span, self._metrics
        host.attach(host.Host(folder, self._log, caller, metrics, ask, device, instance, record))

    def _detach(self) -> None:
        """Detach from everything shared with the server: for a child that the model forked."""
        self._control.detach()
        self._borrowed.forget(self._control.lent)
        self._outputs.disown()
        self._batches.disown()
        self._metrics.disown()
        self._calls.disown()
        self._forked.after_in_child()
        self._batches.signals.in_model = True
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
        """Have a fallback to a slower path logged and counted, whatever the log level."""
        fields = {"level": level, "text": text, "file": __file__, "line": 0}
        once = reason if reason == "native_module" else ""
        self._channel.send(control_message(Kind.NOTICE, fallback=reason, once=once, **fields))

    def _warn_once(self, name: str, text: str) -> None:
        """Have a warning about an output logged, unless another process of the model has sent it."""
        fields = {
            "level": int(Logger.WARNING),
            "text": shortened(text),
            "file": __file__,
            "line": 0,
        }
        self._channel.send(control_message(Kind.NOTICE, once=name, **fields))

    def _record_span(self, fields: dict[str, Any]) -> None:
        try:
            self._channel.send(control_message(Kind.SPAN, **fields))
        except BridgeError:
            # The server is gone, or this is a child that the model forked.
            pass

    def _log(self, level: int, text: str, file: str, line: int) -> None:
        if self._control.log_levels >> level & 1:
            self._output.log(LogLine(level, shortened(text), file, line))


def _while_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method for as long as its object lives.

    Functions around a fork stay registered, while a process of tests may have many stubs.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def _package(model: StubModel) -> str:
    """Return the package into which a model's file is imported; none for the file of a backend."""
    return str(model.version) if model.backend == "python" else ""


def run(fd: int, server_pid: int) -> int:
    """Serve the channel on descriptor ``fd`` until it closes; returns the exit code."""
    die_with(server_pid)
    report_crashes()
    channel = Channel(socket.socket(fileno=fd))
    os.register_at_fork(after_in_child=channel.close)
    try:
        message, fds = channel.receive()
        channel.send(control_message(Kind.CONNECTED, python=sys.version.split()[0]))
        settings, memory, token = decode_initialize(message)
        stub = Stub(channel, settings, memory, fds, ModelOutput(Output(token).log))
        stub.hold_signals()
        return stub.serve() if stub.initialize() else 1
    except ChannelClosed as closed:
        cause = closed.__cause__
        if os.getppid() != server_pid or getattr(cause, "errno", 0) not in _CLOSED_HERE:
            # The server is gone, or this is a child that the model forked.
            return 0
        sys.stderr.write("the model closed its stub's channel to the server: the stub ends\n")
        return 1
