"""A model's calls without processes: the client of a stub, and the server's side of its channel."""

import queue
import socket
import threading

from gpubridge.pb_utils import InferenceRequest, host
from gpubridge.stub.bls.client import BlsClient
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.transport.calls import CallKind, decode_calls, encode_records
from gpubridge.transport.channel import Channel, ChannelClosed
from gpubridge.transport.context import CallContext, ResponseContext
from gpubridge.transport.messages import ResponseFlag, control_message, decode_control
from gpubridge.transport.records import record_encoder, record_reader
from gpubridge.transport.signatures import encode_signature
from gpubridge.transport.wait_predictor import WaitPredictor

SECONDS = 20
"""What takes longer has failed."""
_NOTHING = encode_signature([])


class CallServer:
    """Receives what a client sends, in a thread, and answers when a test says so.

    - ``client``: what `pb_utils` calls with.
    - ``calls``: numbers and batches of the calls, as they come. ``cancels``: numbers and whether their
      responses are still read. ``credits``: numbers and responses that may be sent more. ``blocking``: in
      which of the calls that were asked about an execute is blocked.
    - ``messages``: how many calls came in each message.
    - ``listens``: set while it receives further messages.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channel, self._stub = Channel(theirs), Channel(ours)
        self.client = call_client(self._stub, WaitPredictor(0))
        self.calls: queue.Queue[tuple[int, int]] = queue.Queue()
        self.cancels: queue.Queue[tuple[int, bool]] = queue.Queue()
        self.credits: queue.Queue[tuple[int, int]] = queue.Queue()
        self.blocking: queue.Queue[list[int]] = queue.Queue()
        self.messages: list[int] = []
        self.listens = threading.Event()
        self.listens.set()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        host.attach(host.Host("", print, self.client, ask=self.client.ask))

    def close(self) -> None:
        host.detach()
        self.client.close()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self._channel.close()

    def hang_up(self) -> None:
        """End as a server that dies."""
        self._channel.socket.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        reader = record_reader(CallContext)
        while True:
            assert self.listens.wait(SECONDS)
            try:
                message, _ = self._channel.receive()
            except ChannelClosed:
                return
            if message[0] == CallKind.CALL:
                records, batches = decode_calls(message, reader)
                self.messages.append(len(records))
                for record, batch in zip(records, batches, strict=True):
                    self.calls.put((record.ticket, batch))
                continue
            fields = decode_control(message)
            if message[0] == CallKind.CANCEL:
                self.cancels.put((fields["call"], fields.get("still_read", False)))
            elif message[0] == CallKind.TAKEN:
                self.credits.put((fields["call"], fields["responses"]))
            elif message[0] == CallKind.BLOCKING:
                self.blocking.put(fields["calls"])
            else:
                answer = control_message(CallKind.ANSWER, question=fields["question"])
                self._channel.send(answer)

    def next_call(self) -> int:
        """Return the number of the next call."""
        return self.calls.get(timeout=SECONDS)[0]

    def next_cancel(self) -> tuple[int, bool]:
        """Return what the next CANCEL says."""
        return self.cancels.get(timeout=SECONDS)

    def are_blocking(self, *calls: int) -> list[int]:
        """Ask in which of some calls an execute is blocked."""
        self._channel.send(control_message(CallKind.ARE_BLOCKING, calls=calls))
        return self.blocking.get(timeout=SECONDS)

    def caught_up(self) -> None:
        """Wait until all that was sent before has been heard."""
        self.client.ask("ready")

    def answer(self, *answers: tuple[int, object, bool]) -> None:
        """Send responses in one message: number, value (None for an empty one), whether more follow."""
        self._channel.send(encode_records(CallKind.CALL_RESPONSES, [_record(*a) for a in answers]))


def call_client(channel: Channel, waits: WaitPredictor, awake_ns: int = 0) -> BlsClient:
    """Make the client of a channel, with memory of its own."""
    lent, table = memoryview(bytearray(16)), memoryview(bytearray(16))
    return BlsClient(channel, lent, OutputMemory(1, 1 << 20, table, print, print), waits, awake_ns)


def _record(number: int, value: object, open_: bool) -> bytes:
    flags = ResponseFlag.OPEN if open_ else 0
    if value is None:
        flags |= ResponseFlag.EMPTY
    context = ResponseContext(parameters="" if value is None else str(value))
    return record_encoder()(number, _NOTHING, b"", (), flags, b"", context.encoded())


def query() -> InferenceRequest:
    """Make a request to another model."""
    return InferenceRequest(model_name="other", inputs=[], requested_output_names=["OUT"])


def value(response) -> str | None:
    """Return what `CallServer.answer` put into a response; None for an empty one."""
    text = response.parameters()
    return None if text == "{}" else text
