"""Types of the compiled module's server half; `gpubridge.dataplane` re-exports them with their contract.

What stubs use of the module is typed in `gpubridge.tensor.native`, since they may run without it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from gpubridge.host_shm import Account, Slot
from gpubridge.request import (
    ClientUse,
    MemoryRange,
    Outcome,
    Parameters,
    RequestOptions,
)
from gpubridge.transport.context import RequestContext
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.signatures import Shapes, Signature

def count_json_parts(document: bytes | memoryview, /) -> tuple[int, int, int]:
    """Return how many members and objects, arrays, and commas a JSON document has.

    Other threads run meanwhile; the document need not be valid.
    """

def split_json_data(document: bytes | memoryview, /) -> tuple[bytes, list[tuple[int, int]]] | None:
    """Take the values of the inputs out of a request's JSON.

    Returns: the document with an empty array in the place of each ``inputs[i].data`` that is one,
    and where those are (start, bytes). None where they cannot be told by looking at brackets and
    names: what is taken out, and what is left, has still to be parsed.
    """

def split_long_strings(
    document: bytes | memoryview, /
) -> tuple[bytes, list[tuple[int, int]]] | None:
    """Take the strings of more than 64 KiB out of a JSON document.

    Returns: the document with strings of a NUL and a number, from 0 on, in their places, and where what
    stands between their quotation marks is (start, bytes). None where a name is that long, a string that
    stays has an escaped NUL, or one does not end; all has still to be parsed. Holds no lock of the
    interpreter while it works.
    """

def plain_json_string(document: bytes | memoryview, start: int, nbytes: int, /) -> bytes | None:
    """Return a JSON string, whose text has that place in a document, without needless escapes.

    None for what is no such text. Holds no lock of the interpreter while it works.
    """

def limit_heap() -> None:
    """Bound the free memory that the C library keeps of this process, a server; call it before threads start.

    Does nothing where the C library is not glibc.
    """

def owned_view(memory: bytes | memoryview, owner: object) -> memoryview:
    """Return a view of memory that holds an owner of it; what views it holds the owner, too.

    The owner is let go of, on the thread that deletes the last view, after the memory is.
    """

def split_form(
    form: bytes | memoryview, /
) -> tuple[bytes, bytes, Sequence[tuple[int, int] | None]] | None:
    """Take what may be long out of a ModelInferRequest without id and raw contents.

    Returns: the message without the request's own parameters, as far as these are valid, and with one
    element in each field of long typed contents that has any; those parameters as a JSON object, empty
    for none; and where in ``form`` each input has its typed contents (start, bytes), None where the
    message has them still. None for a message that is malformed, or in any way unusual. Holds no lock of
    the interpreter while it works.
    """

def pack_json_values(
    document: bytes | memoryview, start: int, nbytes: int, datatype: str, count: int, /
) -> bytes | None:
    """Return the leaves of an array in a document as the bytes of a tensor of ``count`` elements.

    Accepts what orjson accepts, with the same meaning, within the range of the datatype. None for anything else. Holds
    no lock of the interpreter while it works.
    """

def pack_json_parameters(parameters: bytes | memoryview, /) -> bytes | None:
    """Return the members of a JSON object as the parameters of a ModelInferResponse.

    None where one is no boolean, no string and no integer of 64 bits, a name has an escape or comes
    twice, or there is more or less than an object. Holds no lock of the interpreter while it works.
    """

def format_json_string(before: str, text: bytes | memoryview, after: str, /) -> bytes | None:
    """Return a text in UTF-8 as a JSON string between two others; None for what is no UTF-8.

    Holds no lock of the interpreter while it works.
    """

def format_json_values(data: bytes | memoryview, datatype: str, count: int, /) -> bytes | None:
    """Return a tensor's elements as a flat JSON array; None for malformed BYTES, or another count.

    Floats have the shortest digits that read back as the same double; NaN, Infinity and -Infinity are
    literals. Bytes of strings that are no UTF-8 go out as they are. Holds no lock of the interpreter
    while it works.
    """

def pack_typed_contents(
    message: bytes | memoryview, field: int, form: str, size: int, /
) -> bytes | None:
    """Return the values of a repeated field of a serialised message as elements of ``size`` bytes.

    ``form`` is how they lie there: "varint", "fixed", or "bytes" for the strings of a BYTES tensor. None
    for a malformed message. Holds no lock of the interpreter while it works.
    """

class DynamicBatcher:
    """The default queue and the dynamic batcher, of any Python objects.

    A batch is due when it has the largest preferred size within reach, when it cannot grow any more
    (the next item does not fit, or has another shape), or when its oldest item has waited for
    ``max_delay_us``. Then, and only then, it may have any size up to ``max_batch_size``. With no
    arguments but 0 it gives one item after the other: the default queue.

    It reads no clock: ``now`` is that of any clock that never goes back. It holds an item from
    `add` until `take`, `refused`, a `cancel` that returns True, or `clear` gives it away; a taken
    item comes back by `put_back`, or is reported by `answered` where the order is kept.

    - ``max_batch_size``: 0: every item is a batch.
    - ``preferred``: batch sizes.
    - ``max_delay_us``: how long an item may wait for others.
    - ``keep_order``: outcomes go out in the order in which items were taken first.
    - ``levels``: priorities are 1, the highest, to this; 0 for a queue without priorities.
    - ``default_level``: where items go that name no priority, or none that exists.
    - ``policy``: the limits of a level: whether late items go behind the others (else they are
      refused), when they are late (microseconds in the queue; 0 for never), whether items may ask
      for less, and how many may wait (0 for any number).
    - ``policies``: those of the levels with their own.
    """

    def __init__(
        self,
        max_batch_size: int,
        preferred: Sequence[int] = ...,
        max_delay_us: int = ...,
        keep_order: bool = ...,
        levels: int = ...,
        default_level: int = ...,
        policy: tuple[bool, int, bool, int] = ...,
        policies: Mapping[int, tuple[bool, int, bool, int]] = ...,
    ) -> None: ...
    pending: int
    """Items that were not taken, those included that `refused` is about to return."""
    def add(
        self, item: Any, size: int, shape: int, priority: int, timeout_us: int, now: int, /
    ) -> int:
        """Take an item over; returns 0, or 1 if the queue of its level is full, 2 after `stop`."""
    def take(self, instance: object, now: int, most: int = ..., /) -> list[Any] | None:
        """Give away the next batch if it is due, or the ``most`` that come first of it; for any instance."""
    def take_ahead(self, instance: object, now: int, /) -> list[Any] | None:
        """Give away the next batch if it cannot grow, and nothing may come before it or has a limit."""
    def next_wakeup(self, now: int, /) -> int | None:
        """Return when a batch becomes due, or an item late, by the mere passing of time."""
    def refused(self, now: int, /) -> list[Any]:
        """Give away the items whose time in the queue is over."""
    def cancel(self, item: Any, /) -> bool:
        """Give an item away if it was not taken yet; return whether that was so."""
    def put_back(self, items: Sequence[tuple[Any, int, int, int, int]], /) -> None:
        """Put items before all others of their level, in the order given; they are never late.

        Each with its size, shape, priority and the time at which it came.
        """
    def answered(self, item: Any, /) -> list[Any]:
        """Hear that a taken item has its outcome; return the items whose outcomes may go out now."""
    def releasable(self) -> list[Any]:
        """Return what waited for an item that was cancelled or refused."""
    def abandon_order(self) -> list[Any]:
        """Give up the order for what was taken; return what can go out therefore."""
    def stop(self) -> None:
        """Accept nothing from now on."""
    def clear(self) -> list[Any]:
        """Give every item away that was not taken."""

class Http2Limits:
    """Limits of one connection that may be set, with their defaults; `csrc/net/http2_state.h` says what each is."""

    max_concurrent_streams: int
    max_frame_size: int
    stream_window: int
    connection_window: int
    header_list_bytes: int
    receive_bytes: int
    unsent_control_frames: int
    resets: int
    resets_per_second: int
    idle_frames: int
    idle_frames_per_second: int
    def __init__(self) -> None: ...

class GrpcMethods:
    """The methods of a server; each is known by its place in the sequence.

    ``methods``: path, kind, and bytes of the longest message. Kinds: 0 for one message, 1 for any number,
    2 for one message of a control call.
    """

    counts: RequestCounts
    """Answered calls: of a method at its place and one, of an unknown one at 0."""
    def __init__(self, methods: Iterable[tuple[bytes, int, int]]) -> None: ...
    def require(self, method: int, field: RequiredField, /) -> None:
        """Have no call of a method ``admitted`` without a field, once."""

class RequiredField:
    """A header field that requests must have, with one of some values, which are secrets.

    - ``name``: in lower case.
    """

    def __init__(self, name: bytes, values: Iterable[bytes]) -> None: ...
    def set_values(self, values: Iterable[bytes], /) -> None:
        """Admit requests with these values from now on."""
    def admits(self, given: bytes, /) -> bool:
        """Return whether a value is one of them, in a time that does not tell which is nearly right."""

class HeaderFields:
    """Header fields to be sent, not checked: names in lower case, pseudo-header fields first.

    - ``fields``: names and values.
    - ``repeat``: they are sent again and again: the peer's table gets to know them.
    """

    def __init__(self, fields: Iterable[tuple[bytes, bytes]], repeat: bool = ...) -> None: ...

class RequestHeaders:
    """The headers of a request, valid. The same object comes again where they are the same bytes."""

    path: bytes
    """The path; empty for CONNECT."""
    fields: tuple[tuple[bytes, bytes], ...]
    """All fields in their order, pseudo-header fields included."""
    plain: bool
    """True for a POST with a content type of gRPC, without compression and without a time-out."""
    admitted: bool
    """True if the field that the method requires is there."""
    coding: bytes
    """Return ``grpc-encoding``; empty where there is none."""
    accepted_codings: bytes
    """Return ``grpc-accept-encoding``; empty where there is none."""
    timeout: bytes | None
    """Return ``grpc-timeout`` as it came."""

class GrpcInferEndpoint:
    """Facts common to the calls of ModelInfer that the plane takes without Python.

    - ``method``: its number among the methods.
    - ``templates``: of the requests.
    - ``sampling``: the calls that are Python's, because they are traced.
    - ``headers``, ``trailers``: of answers.
    """

    def __init__(
        self,
        method: int,
        templates: RequestTemplates,
        sampling: TraceSampling,
        headers: HeaderFields,
        trailers: HeaderFields,
        /,
    ) -> None: ...

class GrowingMemory:
    """Private memory of a body, of which there is as much as has been asked for so far.

    Its length is ``nbytes``, those of the whole body; as a buffer, and in slices, it has what is there.
    Views keep what they were made of: where there are some, it grows elsewhere.

    Raises MemoryError.
    """

    def __init__(self, nbytes: int, /) -> None: ...
    def resize(self, size: int, /) -> None:
        """Have so many bytes; further ones than there were are undefined."""
    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> memoryview: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class GrpcConnectionState:
    """Moves bytes between a transport and an `Http2Connection`, and plain calls to their models.

    - ``owner``: its ``take(events)`` gets the events that are Python's, its ``flushed(outcome)`` what
      `Http2Connection.flush` returns that is not None, or all of it once the client has ``hung_up``;
      its ``failure(error, number)`` words errors, of calls by their numbers in the access log, its
      ``hand_over`` takes a call over that the plane had begun; large messages are charged to its
      ``account``; its ``charge(nbytes)`` charges what is kept beside them, and returns the charge.
    - ``calls``: those that are open, by stream; the plane puts its own there, too.
    - ``infer``: None where all calls are Python's.
    - ``idle``: the owner stands there while it has no call open.
    """

    paused: bool
    """True while the transport takes no more to be sent."""
    hung_up: bool
    """True when the client sends no more."""
    charged: int
    """What the owner has charged for what is kept here; set it where that is no longer so."""
    @property
    def full(self) -> bool:
        """Whether the last charge was refused, and so much is kept still: no more is to be taken."""
    @property
    def full_of_control(self) -> bool:
        """Whether control calls keep so much that no more of them are to be taken, either, when it is full."""
    def __init__(
        self,
        http2: Http2Connection,
        owner: object,
        calls: dict[int, Any],
        infer: GrpcInferEndpoint | None,
        idle: IdleConnections,
        /,
    ) -> None: ...
    def start(self, transport: object, descriptor: int, soon: Callable[..., object], /) -> None:
        """Give it the transport; ``soon`` has something called in the next turn of the event loop."""
    def get_buffer(self, sizehint: int, /) -> memoryview:
        """Return where the next bytes go."""
    def buffer_updated(self, nbytes: int, /) -> None:
        """Take bytes that have come."""
    def end_input(self) -> None:
        """The client sends no more: requests that have not ended do so now."""
    def flush(self) -> None:
        """Send as much as the socket takes."""
    def flush_soon(self) -> None:
        """Send what calls have left to be sent; once for all that they leave in a turn of the loop."""
    def lose(self) -> None:
        """Forget all streams and the owner: the socket is gone."""

class Http2Connection:
    """The server's side of an HTTP/2 connection, with gRPC's messages; without a socket.

    The socket's owner asks `memory` where to receive, tells `received` how much came, takes the events
    that it returns, and calls `flush` when there may be something to be sent and the socket can be
    written. Events are tuples; `gpubridge.frontend.grpc.connection` lists them. Views in events are valid
    until more is received. A stream whose path is none of the methods has its body handed on as it
    comes. What belongs to a stream that is closed, by either side, is ignored: the caller cannot
    know yet. Not for several threads.

    - ``methods``: what is served.
    - ``limits``: what the peer may ask.
    """

    def __init__(self, methods: GrpcMethods, limits: Http2Limits) -> None: ...
    def set_client(self, client: str, /) -> None:
        """Name the peer, for the access log."""
    def note(self, stream: int, statistics: Any, identifier: str, /) -> None:
        """Tell the access log whose request a stream has: the ``statistics`` of a model."""
    def number(self, stream: int, /) -> int:
        """Return the number of a stream's call in the access log; 0 without one."""
    def begin_request(self, stream: int, received: int, /) -> RequestRecord | None:
        """Return the record of one of a stream's requests, of so many bytes, in place of the stream's own.

        None without an access log.
        """
    def memory(self, /) -> memoryview:
        """Return where the next bytes are to be received."""
    def received(self, nbytes: int, now: float, /) -> list[tuple[Any, ...]]:
        """Take ``nbytes`` that came there, at a time in seconds; return what has happened."""
    def receive_more(self, descriptor: int, now: float, /) -> list[tuple[Any, ...]]:
        """Receive what a socket has of a large body in small frames, straight into its place.

        Ask after `received`, and again while there are events.
        """
    def flush(
        self, descriptor: int, /
    ) -> tuple[list[memoryview], list[tuple[Any, ...]], bool] | None:
        """Send what may be sent now, as far as the socket takes it.

        ``descriptor``: the socket, whose transport must have nothing to send; -1 to have everything
        returned.

        It returns:

        - ``left``: what the socket has not taken, in order, to be sent before anything else. Memory
          of callers in it is theirs again when the views are gone.
        - ``events``: what has happened.
        - ``more``: whether to call again, after others had their turn. None instead of all three
          for nothing, as long as the connection is not closed.
        """
    def end_input(self, /) -> list[tuple[Any, ...]]:
        """End the requests that have not ended: the peer sends no more; return what has happened."""
    def lost(self, /) -> None:
        """Forget all streams and their memory: the socket is gone."""
    closed: bool
    """True when the connection has ended: flush, and close the socket; nothing more is received."""
    started: bool
    """True when the client's preface and the beginning of its settings are there."""
    highest_stream: int
    """The highest id of a stream that the peer has used."""
    frames_sent: int
    """Grows with the DATA frames sent, and with the streams ended."""
    open_streams: int
    """Number of streams that are not closed."""
    kept: int
    """Bytes of header blocks, header lists and unfinished messages that the peer has it keep."""
    open_block: int
    """The stream whose header block is not complete, else 0."""
    heard: float
    """The time of the last `received`."""
    def receive_into(self, stream: int, target: memoryview, /) -> None:
        """Receive the stream's next DATA payload into ``target``; then FILLED comes.

        The stream may send as much at once, whatever its window was. If the request ends before
        ``target`` is full, DATA with its end comes instead. What was received already is not copied:
        that is for the caller to do. ``target`` belongs to the connection until it is full or the
        stream is closed.
        """
    def unfinished(self, stream: int, /) -> int:
        """Return how many bytes of a stream's unfinished message it keeps; none of a large one's."""
    def missing(self, stream: int, /) -> int:
        """Return how many bytes the target of `receive_into` still lacks; 0 if there is none."""
    def copied(self, stream: int, /) -> int:
        """Return how many bytes of all targets of a stream were copied on their way."""
    def keep(self, stream: int, nbytes: int, /) -> None:
        """Count so many bytes as `kept` for the open requests of a stream."""
    def throttle(self, stream: int, /) -> None:
        """Let the stream send only its window beyond what `consume` has counted."""
    def consume(self, stream: int, nbytes: int, /) -> None:
        """Let a throttled stream send ``nbytes`` more: as many were used up."""
    def send_headers(self, stream: int, fields: HeaderFields, end: bool = ...) -> None:
        """Send response headers, or with ``end`` trailers behind all data.

        Raises RuntimeError: headers that end nothing, behind queued data, or behind the end.
        """
    def send_data(
        self, stream: int, buffers: Iterable[bytes | memoryview], end: bool = ...
    ) -> None:
        """Send body bytes; what the peer's windows do not allow yet is queued, not copied.

        The buffers must stay as they are until they are sent. Raises RuntimeError behind the end.
        """
    def send_response(
        self,
        stream: int,
        headers: HeaderFields,
        body: Iterable[bytes | memoryview],
        trailers: HeaderFields,
        /,
    ) -> None:
        """Send all of a response at once; the same as headers, data and trailers in turn."""
    def held_back(self, /) -> list[tuple[int, int]]:
        """Return the streams with body bytes that the peer's windows do not allow.

        Each with how many bytes were let through so far; to be asked after `flush`.
        """
    def queued(self, stream: int, /) -> int:
        """Return how many bytes wait; when it falls to 0, WRITABLE comes."""
    @property
    def all_queued(self) -> int:
        """How many bytes of all streams wait."""
    def reset(self, stream: int, code: int, /) -> None:
        """Close a stream with RST_STREAM, and drop what it has queued; no event comes."""
    def ping(self, payload: bytes, /) -> None:
        """Send a PING of eight bytes; PONG comes with its answer."""
    def drain(self, /) -> None:
        """Ask the peer for no more streams; when it knows (a PING later), accept none any more."""
    def goaway(self, /) -> None:
        """Accept no more streams; when those that are open have ended, the connection is closed."""
    def close(self, code: int, text: str, /) -> None:
        """End the connection now, with GOAWAY and a text for the peer; open streams are dropped."""

class BusyPoll:
    """Keeps the event loop awake for a moment between the short messages of one stub and its clients.

    It learns how long these take. While a callback is scheduled, the loop polls for events without
    sleeping; events of other connections are handled as usual. Each turn offers the processor to others.

    - ``call_soon``: schedules a callback in the loop's next turn.
    - ``events``: a descriptor that is readable while the loop has events; -1 for none.
    - ``awake_ns``: the longest time to poll; 0: never.
    - ``taken_ns``: if the processor was away for longer, another thread wanted it.
    - ``clock``: the time in ns, for tests.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        events: int,
        awake_ns: int,
        taken_ns: int = ...,
        clock: Callable[[], int] | None = None,
    ) -> None: ...
    def sent(self, alone: bool) -> bool:
        """Record a batch sent to the stub; ``alone``: the stub was idle.

        Returns whether the next batch is likely to follow soon after the response, alone again.
        """
    def resumed(self) -> None:
        """Record that the stub continues its batch: it got the response to its BLS call."""
    def paused(self) -> None:
        """Record a message by which the stub pauses: it waits for a BLS call."""
    def answered(self) -> None:
        """Record that the stub has completed all its batches."""
    def turn(self) -> None:
        """Look for events in a turn of the loop that is kept awake."""

class InFlightRequests:
    """The requests at one stub: which there are, how far each is, and the memory lent for them.

    It sends them on the stub's channel, takes the messages with results and responses that come there,
    tells each request its outcome, and then the instance's `InstanceFeed`.

    Each request enters once and leaves once: with its answer, or among those that a dead stub leaves.
    It has a ticket meanwhile, under which its memory is lent: its ``slot``, which goes back to the
    arena, or ``ranges``, which are held, until the stub has let go of them, too.

    Results are taken batch by batch; a batch that is not what a stub sends changes nothing. A response
    without anything out of the ordinary becomes an `InferResponse` here; all others are given to the
    hook ``decode``.

    - ``lent``, ``cancelled``, ``passed_on``, ``received``, ``progress``, ``claimed``: those of the
      control page, which stay in use until `close`.
    - ``reader``: of the stub's responses.
    - ``hooks``: see `gpubridge.engine.ipc.in_flight`.
    - ``descriptor``: that of the channel, which is the caller's; in use until `close`.
    """

    def __init__(
        self,
        lent: memoryview,
        cancelled: memoryview,
        passed_on: memoryview,
        received: memoryview,
        progress: memoryview,
        claimed: memoryview,
        reader: Any,
        hooks: Any,
        descriptor: int,
        /,
    ) -> None: ...
    free_tickets: int
    """How many more requests can be at the stub."""
    open_requests: int
    """Requests whose batch has ended, but not they."""
    oldest: int
    """The batch that the stub executes now, or next; 0 if there is none."""
    succeeded: int
    """Grows whenever a request succeeds."""
    def store_with(self, store: Callable[[InferRequest], Any], /) -> None:
        """Have responses stored whose readers are slow, by what ``store`` makes for their request."""
    def holds(self, sequence: int, /) -> bool:
        """Return True if a batch is at the stub."""
    def has_started(self, request: InferRequest, /) -> bool:
        """Return True if the stub has begun the batch of a request that is at the stub."""
    def executes(self, request: InferRequest, /) -> bool:
        """Return True if ``execute`` is known to run for the batch of a request that is not answered."""
    def watch(
        self, on_kept: Callable[[Any], object] | None, on_ended: Callable[[Any], object] | None, /
    ) -> None:
        """Call ``on_kept`` with what stays lent after its request, and ``on_ended`` when it no longer is.

        All responses are given to the hook ``decode`` from then on, until both are None.
        """
    def poll_with(self, poll: BusyPoll | None, /) -> None:
        """Tell ``poll`` of batches that are sent, and when all are answered; None for neither.

        Of batches that follow others it hears only once, until one comes alone.
        """
    def block(self, blocked: bool, /) -> None:
        """Leave all messages to the hook ``send``, or no longer."""
    def flush(self) -> None:
        """Send the batches that were not sent yet."""
    def cancel(self, request: InferRequest, running_only: bool = False, how: int = 1, /) -> None:
        """Let the stub know that a request is cancelled; with ``running_only`` if it has started.

        ``how``: ABANDONED, CANCELLED or GIVEN_UP of `gpubridge.transport.control`. Calls the hook
        ``cancelled``.
        """
    def passed_on(self, request: InferRequest, responses: int, /) -> None:
        """Tell the stub that responses of a request have left, so that it may send others."""
    def receive(self) -> bool | None:
        """Take one message of the channel; None where that is closed, False where there is none."""
    def on_readable(self) -> None:
        """As `receive`, for an event loop: calls the hook ``closed``."""
    def take(self, message: bytes, now: int = 0, /) -> None:
        """Take a RESULTS or RESPONSES message that came at ``now``, CLOCK_MONOTONIC ns; 0: just now."""
    def take_gathered(self, message: bytes, /) -> None:
        """Take the RESULTS message that a dead stub had gathered, unless it had sent it, too."""
    def release_kept(self) -> bool:
        """Take back the memory that the stub is done with by now; returns whether some is left."""
    def lend(self, ranges: Sequence[Any], /) -> int | None:
        """Lend the memory of an answer to a call; returns its ticket, None when there is none left."""
    lent_answers: int
    """How many answers to calls are lent."""
    kept_requests: int
    """How many requests are over, whose memory the stub still looks at."""
    def find(self, ref: tuple[int, int, int, int], /) -> Any:
        """Return memory that is lent to the stub, to hand it on; a slot is shared from then on.

        Raises ValueError when it is not lent under that ticket.
        """
    def all_kept(self) -> list[Any]:
        """Return what is held under any ticket."""
    def left(self) -> list[tuple[int, int, Any]]:
        """Return the requests that are not over, each behind its batch (0 for none) and its ticket."""
    def close(self, started_last: int, /) -> tuple[list[Any], list[Any]]:
        """Take everything back from a stub that is dead.

        Returns: requests without an outcome: those whose batch had started, and the others, in
        order. The slots of the unstarted are theirs again; all other memory has been taken back.
        """

class Call:
    """A call of a stub's model on its way; it gets the outcome of its request.

    - ``number``: the stub's.
    - ``batch``: of the caller's requests that it is made for; 0 for none.
    - ``blocks``: whether the ``execute`` of that batch is known to wait for it.
    - ``request``: at the called model.
    - ``form``: the `gpubridge.frontend.bls.requests.CallForm`.
    """

    number: int
    batch: int
    blocks: bool
    request: InferRequest
    form: Any

class CallChannel:
    """Calls of one stub's model: gives them to the called models, and sends their answers.

    No byte of a tensor is touched: what a call's inputs and an answer's outputs lie in is handed on.
    Answers of one turn of the event loop are sent together, unless there is no other call.

    - ``requests``: those at the stub, which lend it memory.
    - ``reader``: of calls.
    - ``hooks``: see `gpubridge.frontend.bls.server`.
    - ``descriptor``: that of the channel, which is the caller's; in use until `close`.
    """

    def __init__(
        self, requests: InFlightRequests, reader: Any, hooks: Any, descriptor: int, /
    ) -> None: ...
    def receive(self) -> bool:
        """Take one message of the channel; returns whether there was one."""
    def take(self, records: list[Any], batches: Sequence[int], /) -> None:
        """Give calls, of a message that came in another way, to the called models.

        Each is made for the requests of a batch; 0 for none.
        """
    def flush(self) -> None:
        """Send what has been answered in this turn of the event loop."""
    def end(self, number: int, outcome: Any, /) -> None:
        """Answer a call, if it is under way."""
    def forget(self) -> None:
        """Ask anew for the forms of calls: models have changed."""
    def block(self, blocked: bool, /) -> None:
        """Leave all messages to the hook ``send``, or no longer."""
    def mute(self) -> None:
        """Answer nothing any more."""
    def call(self, number: int, /) -> Call | None:
        """Return a call that is under way."""
    def calls(self) -> list[Call]:
        """Return the calls that are under way."""
    @property
    def kept(self) -> int:
        """Bytes that the open calls keep beside their tensors."""
    charged: int
    """What the owner has charged for what is kept here; set it where that is no longer so."""
    def close(self) -> list[Call]:
        """Let go of everything; returns the calls that are under way."""

class InferRequest:
    """One inference request on its way through the server.

    Who submits a request to a model gives it away: the model frees ``slot``, whatever happens, and
    calls ``on_done`` exactly once, on the event loop, unless :meth:`cancel` was called before. Where
    a model may send several responses, ``on_partial`` gets each that is not the last.

    - ``signature``: the encoded signature of its inputs and of the outputs asked for.
    - ``slot``: the memory that holds all inputs.
    - ``start``: where in the slot they begin.
    - ``places``: offset from there and number of bytes of each input.
    - ``on_done``: gets the response or the error.
    - ``identifier``: the client's id of the request.
    - ``context``: what else goes to the stub.
    - ``copied``: bytes of tensor data that were copied on the way here.
    - ``batch_size``: its first dim where the model batches, else 1; 0 for a place in a batch that
      no request fills.
    - ``options``: for the scheduler.
    - ``dims``: the encoded dims of its inputs, as the model sees them.

    Its attributes:

    - ``on_partial``: gets a response, or an error in the place of one, after which others may come;
      ``on_done`` then gets the last one, or None if there was only the word that no more come. Who
      has set this calls :meth:`passed_on` for what it got, or the others of a stub are stored: it gets
      64 of them, or below 1 MiB and one more. Not set: the first response is the outcome.
    - ``account``: charged for what is stored; None for a reader without a connection.
    - ``stored``: what stores them, see `gpubridge.engine.memory.response_store`. The outcome comes
      after what is stored; None drops that.
    - ``trace``: who follows it, if it is traced.
    - ``arrived``: when the model took it, in CLOCK_MONOTONIC nanoseconds.
    - ``item``: what a sequence batcher holds for it; None where the scheduler holds the request
      itself.
    - ``pattern``: another request of the same batch, whose inputs it has.
    - ``unsent``: how many responses that are not the last were handed out, and not yet passed on.
    - ``ranges``: where each input lies, if not all of them are in the slot at ``places``. The slot,
      if there is one, is freed as ever.
    - ``client``: held while the client's own memory may be read or written for it; then there are
      ``ranges``.
    """

    signature: bytes
    dims: bytes
    places: Sequence[tuple[int, int]]
    slot: Slot | None
    start: int
    on_done: Callable[[Any], None] | None
    on_partial: Callable[[Outcome], None] | None
    first: Outcome | None
    identifier: str
    context: RequestContext
    copied: int
    batch_size: int
    options: RequestOptions
    item: Any
    pattern: InferRequest | None
    client: ClientUse | None
    account: Account | None
    stored: Any
    ranges: Sequence[MemoryRange] | None
    arrived: int
    cancelled: Callable[[InferRequest], None] | None
    ticket: int
    trace: Any
    """What hears of its batch and its end, if it is traced; see `gpubridge.engine.models.tracing`."""
    unsent: int
    instance: Any

    def __init__(
        self,
        signature: bytes,
        slot: Slot | None,
        start: int,
        places: Sequence[tuple[int, int]],
        on_done: Callable[[Any], None],
        identifier: str = "",
        context: RequestContext = ...,
        copied: int = 0,
        batch_size: int = 1,
        options: RequestOptions = ...,
        dims: bytes = b"",
    ) -> None: ...
    def respond(self, outcome: Outcome, /) -> None:
        """Give a response that is not the last to who waits for it."""
    def passed_on(self, responses: int, /) -> None:
        """Say that so many of the responses have left: who takes them gets others that are stored."""
    def finish(self, outcome: Outcome | None, /) -> None:
        """Give the outcome to who waits for it; at most once."""
    def cancel(self) -> None:
        """Cancel the request: its outcome is dropped, and the model is spared the work if it can be."""

class InferResponseFields:
    """The fields of a `gpubridge.request.InferResponse`."""

    signature: Signature
    shapes: Shapes
    buffers: Sequence[memoryview]
    parameters: Parameters | None
    memory: BorrowedMemory | None
    refs: Sequence[tuple[int, int, int, int]]
    event: Any

    def __init__(
        self,
        signature: Signature,
        shapes: Shapes,
        buffers: Sequence[memoryview],
        parameters: Parameters | None = None,
        memory: BorrowedMemory | None = None,
        refs: Sequence[tuple[int, int, int, int]] = (),
        event: Any = None,
    ) -> None: ...

class SendTurn:
    """Says when messages leave for the stubs of an event loop.

    To wake a stub costs more than a small request: while the loop has other events, requests are added
    to the messages, for 0.1 ms at most.

    - ``call_soon``: has something called at the end of the turn of the event loop.
    - ``events``: a descriptor that is readable while the loop has events; -1 where it does not say.
    - ``processors``: how many there are.
    """

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], events: int, processors: int, /
    ) -> None: ...
    def end(self) -> None:
        """Send what is due, unless the event loop has events; then it is called again."""

class InstanceFeed:
    """Leads batches to one model instance, to whichever stub it has; knows how many are there.

    ``listener``: its ``on_batches`` is called when batches were answered, unless the instance's
    `RequestDispatch` can do without; its ``fail_unsent`` gets each request that could not be written for
    the stub, and the exception, when the others of its batch were sent.
    """

    def __init__(self, listener: Any) -> None: ...
    def listen(self, listener: Any, /) -> None:
        """Have another listener from now on."""
    def connect(self, stub: InFlightRequests, /) -> None:
        """Send batches to a stub from now on."""
    def open(self, least_window: int, /) -> None:
        """Let the stub have requests; so many, or batches of them, however long they take."""
    def close(self) -> None:
        """There is no stub any more, and nothing at one."""
    def submit(self, requests: list[InferRequest], /) -> None:
        """Give the requests of a batch tickets, lend their memory, and send them.

        They are sent when the `SendTurn` ends, or at once if they come alone.

        Raises ValueError when there are not enough tickets left.
        """
    open_requests: int
    """Requests that the model still answers although their batch has ended."""
    unstarted: int
    """Requests of batches at the stub, which has not begun them."""
    in_flight: int
    """Requests of batches at the stub."""
    free_tickets: int
    """How many requests the stub can be sent."""
    batches: int
    """Batches at the stub."""
    window: int
    """Requests that the stub may have at once; 0 while it takes none."""
    least_window: int
    """As given to `open`."""

class RequestDispatch:
    """The dispatch loop of a model without sequences: its queue, and which instance gets what.

    - ``owner``: has the policies, and words all errors.
    - ``batcher``: the queue.
    - ``ahead``: requests are batches by themselves, and may wait at a stub as well as here.
    - ``ordered``: outcomes are held back until it is their turn.
    - ``counters``: the model's.
    - ``shapes``: gives the number of the shapes of a request's options, where they matter.
    - ``clock``: returns the time, where that is not CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        owner: Any,
        batcher: DynamicBatcher,
        ahead: bool,
        ordered: bool,
        counters: ModelCounters,
        shapes: Callable[[Any], int] | None,
        clock: Callable[[], int] | None,
    ) -> None: ...
    def prepare_with(
        self,
        prepare: Callable[[InferRequest, Any], bool],
        sampling: TraceSampling,
        untraced: Any,
        always: bool,
        /,
    ) -> None:
        """Have `submit` ask ``prepare`` whether a request goes on.

        It asks for each request with ``always`` and for those with ``ranges`` of a client's memory or on a
        GPU; while ``sampling.active``, for those with an origin besides ``untraced``. Requests without an origin it counts.
        """
    def serve(self, feeds: Sequence[InstanceFeed], /) -> None:
        """Feed these instances."""
    def submit(self, request: InferRequest, origin: Any = None, /) -> None:
        """Take a request over, after what has to be done before; ``origin`` is for that."""
    def enqueue(self, request: InferRequest, /) -> None:
        """Take a request over: its slot is freed, its outcome comes by ``on_done``."""
    def dispatch(self, now: int = 0, /) -> None:
        """Send what is due to the instances that have free places, the least loaded first."""
    def on_timer(self) -> None:
        """Dispatch what the owner was asked to set a timer for."""
    def stop(self) -> None:
        """Call ``on_idle`` of the owner whenever nothing is pending, from now on."""
    pending: int
    """Requests that are queued or at a stub."""

class RequestTemplates:
    """What requests with one skeleton have in common, found by the skeleton.

    The skeleton of a request is everything in it but its id, dims, data sizes and the values of its
    parameters. Headers and fields beyond 64 KiB have none, nor have requests whose meaning is not determined
    by looking: members twice, escapes in names, unknown fields, typed contents.

    - ``limit``: bytes that all templates may take; the least recently used ones go first. No
      template may take more than an eighth.
    - ``alignment``: of the places that inputs are given.
    - ``inputs``: if JSON is that of generate requests: the names of the model's inputs.
    """

    def __init__(
        self, limit: int, alignment: int, inputs: Sequence[str] | None = ..., /
    ) -> None: ...
    def __len__(self) -> int: ...
    nbytes: int
    """Bytes that the templates take."""
    def add_json(
        self,
        header: bytes,
        max_batch_size: int,
        inputs: Sequence[tuple[Sequence[int], Sequence[int] | None, int, int, str | None]],
        template: Any,
        /,
    ) -> None:
        """Make a template of a valid request, if it has a skeleton.

        - ``inputs``: of each: its dims in the configuration with the batch dim, -1 for any; the
          dims of its reshape or None; its item size, 0 for BYTES; its bytes in a region of the
          client, else -1; its datatype if its values are JSON, else None.
        - ``template``: its ``vary`` gets role, owner and name of the values that vary beside ids,
          dims and sizes, and the number of outputs asked for; no template is made if it returns
          False.
        """
    def add_fields(
        self,
        fields: bytes,
        sizes: Sequence[int],
        max_batch_size: int,
        inputs: Sequence[tuple[Sequence[int], Sequence[int] | None, int, int, str | None]],
        template: Any,
        /,
    ) -> None:
        """Make a template of a valid ModelInferRequest without its id and raw contents, as `add_json`."""
    def remove_if(self, is_gone: Callable[[Any], bool], /) -> None:
        """Forget the templates that ``is_gone`` accepts."""
    def take_json(
        self,
        slot: Any,
        begin: int,
        header: int,
        following: int,
        on_done: Callable[[Any], None],
        copied: int,
        arena: Any,
        /,
    ) -> tuple[Any, Any, Any] | None:
        """Make the request in a slot: of a header of so many bytes, and those that follow it.

        Inputs are moved to where they are aligned. If some are JSON values, all are put into another
        slot of the ``arena``, and the first one is freed.

        Returns: None for a request without a template, and one that fails any check; nothing was
        moved then.
        """
    def take_message(
        self, message: bytes, on_done: Callable[[Any], None], /
    ) -> tuple[Any, Any, Any] | None:
        """Make the request of a whole ModelInferRequest, as `take_json`.

        Its inputs are copied into a slot of the template's ``arena``.
        """

def read_fields(message: bytes, /) -> tuple[bytes, str, Sequence[int], Sequence[int]]:
    """Return what the top level of a whole ModelInferRequest says.

    That is its form (all but the id and the raw contents), its id, and of each raw content its bytes and
    where it begins. Raises BridgeError for what is no message.
    """

class MessageReceiver:
    """Takes one ModelInferRequest in pieces; owns the memory of its raw contents until `take`.

    Feed it whatever comes. When `target` is some memory, the next bytes of the message may be
    received there instead, then `filled` says so; they may be fed as well.

    - ``nbytes``: bytes of the message. No more than that, and some alignment, is ever allocated.
    - ``arena_of``: returns the arena of the model with a name, None where there is none.
    - ``body``: what the memory is charged to.

    A derived class has ``charge_form(arrived, left)``, which charges more of a long form, and returns
    up to where.
    """

    body: Any
    form_charge: Any
    """The charge of a long form, closed with the receiver; None without one."""
    arena: Any
    """Of the slot; None for private memory."""
    slot: Any
    copied: int
    """Bytes of raw contents that were copied: those that were fed, and what the owner adds."""
    def __init__(self, nbytes: int, arena_of: Callable[[str], Any], body: object, /) -> None: ...
    def feed(self, data: bytes | memoryview, /) -> None:
        """Take the next bytes of the message.

        Raises BridgeError: ``INTERNAL`` as soon as it can be no message, ``UNAVAILABLE`` without
        memory for it.
        """
    def filled(self) -> None:
        """The target has been filled: the next one is more of the same raw content, if there is more.

        Raises BridgeError: ``UNAVAILABLE`` without memory for it.
        """
    @property
    def target(self) -> memoryview | None:
        """Where the rest of the raw content that has begun belongs; None between raw contents."""
    @property
    def complete(self) -> bool:
        """True if the whole message has come."""
    @property
    def form_bytes(self) -> int:
        """Bytes of the form that are there."""
    def arrived(self, missing: int, /) -> int:
        """Return how many bytes of the message are there.

        ``missing``: how many of the target are not; only who received there knows.
        """
    def take(
        self, templates: RequestTemplates, on_done: Callable[[Any], None], /
    ) -> tuple[Any, Any, Any] | None:
        """Make the request of the complete message, as `RequestTemplates.take_message`.

        None also where the raw contents do not lie in their places; raises BridgeError for what is
        no message. The slot goes with the request.
        """
    def give_away(self) -> None:
        """Leave the slot, and what it is charged to, to a request."""
    def drop_memory(self) -> None:
        """Give the memory of the raw contents back, if it was not given away; idempotent."""
    def close(self) -> None:
        """The same, and forget what is charged, and with it the call; idempotent."""
    @property
    def form(self) -> bytes | memoryview:
        """All of the complete message but its id and raw contents; raises BridgeError.

        One of more than a MiB is not copied: a view of it keeps the memory.
        """
    @property
    def identifier(self) -> str:
        """The id; raises BridgeError."""
    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each raw content."""
    @property
    def offsets(self) -> Sequence[int]:
        """Where each begins in the memory."""
    @property
    def memory(self) -> memoryview | None:
        """Of all raw contents; None before there is any."""

class RequestShapes:
    """The shapes of a request's inputs, by name: as of another with the same ranks, with other dims."""

    def __init__(self, first: Iterable[tuple[str, tuple[int, ...]]], dims: bytes, /) -> None: ...
    def __iter__(self) -> Iterator[tuple[str, tuple[int, ...]]]: ...

class TraceSampling:
    """Choice of the requests that are traced; Python gets these, the data plane counts the others.

    - ``active``: whether any may be traced.
    - ``every``: whether Python counts all requests.
    - ``contexts``: whether those with a sampled ``traceparent`` are traced, and those with one that is not
      sampled are not.
    """

    active: bool
    every: bool
    contexts: bool

    def restart(self, rate: int, /) -> None:
        """Choose one of ``rate`` requests from now on; 0 for none."""
    def count(self) -> None:
        """Count a request that is not traced."""
    def choose(self) -> bool:
        """Count a request; return whether it is traced."""

class SlotLists:
    """Lends the free small slots of an arena, which derives from it.

    - ``stacks``: the free slots by size.
    - ``retired``: while it is not empty, slots go back by the arena's ``take_back``, as do those with a
      body. What has no free slot is asked of its ``allocate_new``.
    """

    def __init__(self, stacks: Mapping[Any, list[Any]], retired: list[Any], /) -> None: ...
    def allocate(self, nbytes: int, /) -> Any:
        """Lend a slot of at least ``nbytes`` bytes, all of which will be used; see `HostArena.allocate`."""
    def free(self, slot: Any, /) -> None:
        """Take a slot back; its memory may be lent again at once."""

class JsonResponseTemplate:
    """The header of responses with the same outputs.

    - ``names``: the members with the names of model and version.
    - ``openings``: the JSON of each output up to its shape.
    - ``forms``: how each is written: 0 not at all, 1 as its bytes, 2 as JSON values.
    - ``datatypes``: of each output.
    """

    def __init__(
        self, names: bytes, openings: Sequence[bytes], forms: bytes, datatypes: Sequence[str], /
    ) -> None: ...
    def encode(
        self,
        identifier: str,
        parameters: bytes,
        shapes: Sequence[Sequence[int]],
        values: Sequence[bytes | memoryview],
        /,
    ) -> tuple[bytes, int]:
        """Return the header, and how many bytes of outputs follow it.

        - ``parameters``: a JSON object, or nothing.
        - ``values``: of each output its bytes, or its JSON.
        """

class StreamResponses:
    """The ``on_partial`` of a request on a stream of gRPC: sends plain responses without Python code.

    Gives the model credit for each, by ``request.passed_on``, unless the stream has more to be sent.

    - ``stream``: its number on the connection.
    - ``hooks``: `gpubridge.frontend.grpc.stream.StreamHooks`.
    """

    def __init__(
        self, http2: Http2Connection, stream: int, request: InferRequest, hooks: object, /
    ) -> None: ...
    def __call__(self, outcome: Any, /) -> None: ...

class GeneratedTemplate:
    """The JSON object of responses to generate requests with the same outputs.

    ``members``: the JSON of each name, and its value: JSON, None for the request's id, or index and datatype of an output.
    """

    def __init__(
        self, members: Sequence[tuple[bytes, bytes | tuple[int, str] | None]], /
    ) -> None: ...
    def encode(
        self,
        identifier: str,
        shapes: Sequence[Sequence[int]],
        buffers: Sequence[bytes | memoryview],
        /,
    ) -> bytes | None:
        """Return the object; None where Python has to encode it."""

class MessageResponseTemplate:
    """The frame of ModelInferResponses with the same outputs; see `JsonResponseTemplate`.

    Its names and openings are fields of the messages.
    """

    def __init__(self, names: bytes, openings: Sequence[bytes], forms: bytes, /) -> None: ...
    def encode(
        self,
        identifier: str,
        parameters: bytes,
        shapes: Sequence[Sequence[int]],
        buffers: Sequence[bytes | memoryview],
        stream: bool,
        fields: Sequence[bytes | memoryview] = (),
        /,
    ) -> list[bytes | memoryview] | int:
        """Return the frame in pieces: one if it is small, else long buffers are not copied.

        - ``fields``: encoded fields that follow the outputs.

        For a ``stream`` it is that of a ModelStreamInferResponse. A message of 2 GiB or more has no
        frame: its size is returned.
        """

class CallCounts:
    """Calls that a model has made to another: those that have ended, and nanoseconds of all of them."""

    def __init__(self) -> None: ...
    ended: int
    spent_ns: int

class ModelCounters:
    """Counts for one model version, since it was loaded.

    Durations are Triton's, in nanoseconds: of every request from its arrival at the model to its answer;
    queueing, then the three steps of the execution it was part of. Their counts are ``success_count``.
    """

    def __init__(self) -> None: ...
    inferences: int
    """Requests, each counted with its batch size."""
    executions: int
    """Calls of ``execute``."""
    last_ended_ns: int
    """CLOCK_MONOTONIC nanoseconds of the last execution's end; 0 before the first."""
    success_count: int
    success_ns: int
    queue_ns: int
    fail_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    answer_ns: int
    """From the end of executions until the responses were passed on, of requests that succeeded."""
    duration_bounds: ClassVar[list[int]]
    """Upper bounds of ``duration_counts``, in nanoseconds."""
    duration_counts: list[tuple[int, int]]
    """Requests by the index of the least bound that their duration does not exceed, without zeros."""
    def slow_requests(self, now: int, /) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """Return the slowest requests of the last minutes, in any order.

        Each with its id, its end, its duration, its parts (queue, input, execute, output), and the time until its
        response was passed on.
        """
    def passed_on(
        self, identifier: str, now: int, spent_ns: int, infer_ns: int, answer_ns: int, /
    ) -> None:
        """Count the durations of a request that ended at ``now``, once its response was passed on."""
    cache_hits: int
    """Requests that the response cache answered; of these ``success_count``, too."""
    cache_hit_ns: int
    cache_misses: int
    cache_miss_ns: int
    copied_bytes: int
    """Tensor data that the bridge itself copied in host memory, server and stub together."""
    copies: int
    """How many copies those were."""
    observes: bool
    """True if the durations of single requests are kept, too."""
    failures: dict[str, int]
    """Requests by reason: a new dict."""
    batch_rows: dict[int, tuple[int, int, int, int]]
    """By batch size: executions, and the sums of input, execute and output of them."""
    def take_observations(self) -> list[tuple[int, tuple[int, int, int, int, int]]]:
        """Return when requests ended and how long they took, each step; at most the latest 8192."""
    def copied(self, nbytes: int, /) -> None:
        """Count a copy of tensor data."""
    def cache_hit(self, spent_ns: int, /) -> None:
        """Count a request that the response cache answered."""
    def cache_missed(self, spent_ns: int, /) -> None:
        """Count a request that was looked up in the response cache in vain."""
    def failed(self, reason: str, spent_ns: int, /) -> None:
        """Count a request that failed after ``spent_ns``, for one of Triton's reasons."""
    def executed(
        self,
        executions: int,
        size: int,
        requests: tuple[int, int, int],
        steps: tuple[int, int, int],
        /,
    ) -> None:
        """Count executions of one batch size.

        - ``size``: the sum of the batch sizes of the requests of one execution, which all succeeded.
        - ``requests``: how many requests succeeded in all of them, the same number in each;
          nanoseconds of all of them from arrival to answer, and in the queue.
        - ``steps``: nanoseconds of input, execute and output, summed over the executions.
        """
    def observe(
        self, now: int, spent_ns: int, queue_ns: int, steps: tuple[int, int, int], /
    ) -> None:
        """Take the durations of a request that ended at ``now``, where they are kept."""

class IdleConnections:
    """The connections without a request, those that have been so for longest first."""

    def __init__(self) -> None: ...
    def first(self, count: int, /) -> list[Any]:
        """Return the owners of the first connections, at most ``count``."""
    def __len__(self) -> int: ...

class HttpExchange:
    """An HTTP/1 request, and the place of its answer in the order of its connection.

    Once it is answered, or its connection is lost, answering does nothing.

    ``handler``: told by ``abort`` when the client is gone; None as soon as there is an answer.
    """

    handler: Any
    counters: Any
    """The ``statistics`` of the model that the request is for, while that has not got it; None otherwise."""
    endpoint: int
    """Its number among the endpoints of `RequestCounts`."""
    method: bytes
    target: bytes
    length: int | None
    """Bytes of a body that is received as it is; None for one in chunks or with a coding."""
    whole: bool
    """True if the request came with all of its body; only while it is being taken."""
    coding: str | None
    """The content coding that the client would like for the answer."""
    from_page: bool
    """True if a browser sent it for a page: it has Origin or Sec-Fetch-Site."""
    lost: bool
    """True if the client is gone, or has its answer."""
    account: Account | None
    """Whom the answer is charged to while it waits for its client; None once that is gone."""
    def field(self, name: bytes, /) -> bytes | None:
        """Return the value of the last field of a name, which is given in lower case."""
    def sole_field(self, name: bytes, /) -> bytes | None:
        """Return the same; None where there are several of the name."""
    def fields(self) -> list[tuple[bytes, bytes]]:
        """Return names and values of all fields, in their order, as they came."""
    def receive_into(self, memory: memoryview | GrowingMemory, granted: int, /) -> None:
        """Have the body put into memory; only while the request is being taken.

        What came with the head is copied there at once, the socket receives the rest there: up to
        ``granted`` bytes, for more the owner's ``grow`` is asked.
        """
    def respond(
        self,
        status: int,
        fields: bytes,
        body: bytes,
        buffers: Sequence[bytes | memoryview] = ...,
        *,
        plain: bool = ...,
    ) -> None:
        """Send the answer, or have the owner's ``pack`` do so if the client accepts a coding."""
    def give_up(self, error: object, /) -> None:
        """Answer a request that its handler will not see whole: that is aborted."""
    def fail(self, error: BaseException, status: int | None = ...) -> None:
        """Send an error as the answer, in the words of the owner's ``failure``."""
    def begin(
        self, status: int, fields: bytes, on_sent: Callable[[], None], filler: bytes = ...
    ) -> None:
        """Begin an answer of unknown length: in chunks, or up to the end of the connection.

        - ``on_sent``: told whenever the client has read on.
        - ``filler``: bytes that mean nothing within it: sent once in a while to a client that sends
          no more, to learn whether it is still there.
        """
    def go_on(self, on_sent: Callable[[], None], /) -> None:
        """Go on with an answer that the plane has begun; ``on_sent`` as for `begin`."""
    def send(self, buffers: Sequence[bytes | memoryview], /) -> None:
        """Send more of an answer that was begun."""
    number: int
    """Its number in the access log; 0 without one."""
    def log_failure(self, error: BaseException, /) -> None:
        """Have the owner's ``log_failure(error, exchange)`` log an error that is sent within an answer."""
    def submitted(self, request: InferRequest, /) -> None:
        """Note that a model has the request, and counts what becomes of it."""
    def end(self) -> None:
        """End an answer that was begun."""
    def infer(
        self,
        endpoint: HttpInferEndpoint,
        slot: Any,
        body: tuple[int, int, int],
        copied: int,
        origin: object,
        /,
    ) -> bool:
        """Give an inference request that has a template to its model, and answer it.

        Returns whether it was taken, and answered if it could not be: no BridgeError is raised. The
        slot belongs to it if it was.

        ``body``: where in the slot the body begins, its bytes, and those of its JSON header.
        """
    def __call__(self, outcome: Any, /) -> None:
        """Answer a request that the plane has taken by an outcome.

        A generate request may have several: all but the last come while it has its ``on_done``.
        """

class HttpInferEndpoint:
    """Where inference or generate requests for a model, or for one version of it, go.

    - ``arena``: where bodies are received.
    - ``kind``: 0 for inference, 1 for generate requests, 2 for those that are answered by events. Generate requests of more
      than 64 KiB are left to the owner.
    """

    number: int
    """Its number among the endpoints of `RequestCounts`."""
    statistics: Any
    """The ``statistics`` of what is served."""
    def __init__(self, arena: Any, kind: int = ..., /) -> None: ...
    def set_model(self, served: object, /) -> None:
        """Let what is served, as `gpubridge.frontend.infer.ServedModel`, take the place of another, also for bodies that come."""

class InferTargets:
    """The endpoints of inference by the targets of requests, as clients write them.

    A connection gives POSTs to these targets, whose body comes as it is, to the endpoint itself. What that does not take goes
    to its ``take_over(exchange, slot, start, length, copied)``. Requests without the required field are left to Python.
    """

    def __init__(self, required: RequiredField | None = ...) -> None: ...
    def __len__(self) -> int: ...
    def add(self, target: bytes, endpoint: HttpInferEndpoint, /) -> None: ...
    def remove(self, endpoint: HttpInferEndpoint, /) -> None:
        """Forget all targets of an endpoint."""
    def clear(self) -> None: ...
    def find(self, target: bytes, /) -> Any: ...

class HttpOrigins:
    """Which web pages may send requests, and for which hosts.

    - ``listed``: origins as browsers send them; ``*`` for all.
    - ``names``: hosts, in lower case, that requests may be for beside addresses and names of loopback; None for all.
    """

    def __init__(self, listed: Sequence[str] = ..., names: Sequence[str] | None = ...) -> None: ...

class AccessLog:
    """Writes a line for each request, on a thread of its own.

    - ``descriptor``: where to; closed at the end.
    - ``lines``: their format, as ``--log-format``.
    - ``http``, ``grpc``: names of endpoints, by their numbers in `RequestCounts`.
    """

    dropped: int
    """Requests without a line: the log took lines too slowly, or not at all."""
    def __init__(
        self, descriptor: int, lines: str, http: Sequence[str], grpc: Sequence[str], /
    ) -> None: ...
    def set_format(self, name: str, /) -> None:
        """Write the following lines in another format."""
    def close(self) -> None:
        """Write what waits, for a second at most; idempotent."""

class RequestRecord:
    """The record, for the access log, of a request that is one of several on a call.

    It is logged by its last answer; where there is none, as cancelled when it is let go.
    """

    number: int
    """Its number in the log, which stands for an id."""
    def note(self, statistics: Any, identifier: str, /) -> None:
        """Note whose request it is, by the statistics of the model, and its id."""
    def answer(self, sent: int, status: int | None = ...) -> None:
        """Note that so many bytes are sent, and the status of the request with the last of them."""

class RequestCounts:
    """Answered requests by endpoint and status, as the plane counts them.

    - ``endpoints``: how many there are; 0 is for requests that no endpoint took.
    """

    def __init__(self, endpoints: int, /) -> None: ...
    access_log: AccessLog | None
    """Gets each request when it ends."""
    def rows(self) -> list[tuple[int, int, int]]:
        """Return endpoint, status and count of all that occurred."""

class HttpConnectionState:
    """The protocol of one HTTP/1 connection: bytes in, requests and bytes out.

    - ``owner``: ``take(exchange)`` is called for each request whose head is there: it names a
      handler and memory for the body, and where the request is ``whole`` that is the only call.
      Others are told by ``complete(exchange, copied)`` when the body is in its memory, or by
      ``collect(exchange, body)`` when it came in chunks or with a coding. When as much of a body
      has come as was granted (64 KiB in chunks or with a coding), ``grow(exchange, arrived)``
      returns how much may come, or has failed the exchange: then the rest is dropped.
      ``new_body(exchange)`` returns what a large body of inference is charged to. ``pack``
      sends an answer with a coding, ``failure(error, status, exchange)`` words errors, ``refuse(fault, exchange)`` what
      cannot be read, and ``changed(close)`` says that all is answered and the connection ends, or
      that `reading` is another. ``charge(nbytes)`` charges what is kept beside large bodies (heads,
      pipelined bytes), and returns the charge.
    - ``receive``: where bytes that have no other place yet are received; may be shared.
    - ``idle``: has this connection while it has no request.
    - ``targets``: the endpoints whose requests are taken without the owner.
    - ``origins``: decides on each request first. ``owner.refuse_asker(exchange, by_host)`` fails what it refuses.
    - ``counts``: counts the answers.
    - ``body_limit``: bytes of a body.
    """

    def __init__(
        self,
        owner: object,
        receive: bytearray,
        idle: IdleConnections,
        targets: InferTargets,
        origins: HttpOrigins,
        counts: RequestCounts,
        body_limit: int,
        /,
    ) -> None: ...
    def start(
        self,
        write: Callable[[bytes], None],
        write_lines: Callable[[list[bytes | memoryview]], None],
        /,
    ) -> None:
        """Give the connection what sends bytes."""
    def set_client(self, client: str, /) -> None:
        """Name the client, for the access log."""
    def get_buffer(self, sizehint: int, /) -> bytearray | memoryview:
        """Return where the next bytes go: into a body's own memory if it has one."""
    def buffer_updated(self, nbytes: int, /) -> None:
        """Take bytes that have come."""
    def go_on(self) -> None:
        """Take what had come while too much was open."""
    def end(self) -> None:
        """Hear that the client sends no more: a request that is on its way will never be whole."""
    def lose(self) -> None:
        """Abort every request that is not answered, and forget the owner."""
    def drain(self) -> None:
        """Take no request after the one that is on its way."""
    def close(self) -> bool:
        """Read and send nothing more; returns whether the client may still be sending."""
    def set_stalled(self, stalled: bool, /) -> None:
        """Hear whether the client is behind with reading."""
    def refuse(self, error: BaseException, status: int, /) -> None:
        """Answer what is on its way, or what comes, with an error; read nothing after it."""
    def probe(self) -> None:
        """Send something that changes nothing for a client that waits, once between others."""
    def progress(self) -> tuple[int, int, int]:
        """Return the stage of what is on its way, a number of its own, and the bytes of its body.

        The stages are 0 for nothing, or while nothing is read, 1 for a head, 2 for a body.
        """
    in_body: bool
    """True if a request's head is there, and its body is not yet."""
    stopped: bool
    """True if nothing is read any more."""
    has_pending: bool
    """True if requests have come that are not taken yet; nothing may be received before them."""
    reading: bool
    """True if the socket is to be read."""
    open: int
    """Requests that have no answer yet."""
    placed: int
    """Requests that have come so far."""
    @property
    def kept(self) -> int:
        """Bytes of heads, open requests and pipelined bytes that the client has it keep."""
    charged: int
    """What the owner has charged for what is kept here; set it where that is no longer so."""
