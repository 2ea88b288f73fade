"""Messages: what is encoded is what is decoded, and foreign bytes are refused, never followed."""

import struct

import pytest
from hypothesis import example, given, strategies as st

from gpubridge.tensor import native
from gpubridge.transport import records as records_room
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import RequestContext, ResponseContext
from gpubridge.transport.messages import (
    Kind,
    ResponseFlag,
    control_message,
    decode_control,
    decode_execute,
    encode_frame,
    encode_responses,
    encode_result_batch,
    set_long_texts_aside,
)
from gpubridge.transport.records import record_encoder, record_reader, with_long_text
from gpubridge.transport.signatures import (
    SignatureCache,
    encode_dims,
    encode_signature,
    encode_tensors,
)
from tests.unit.server_messages import decode_responses, decode_results, encode_batch

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
DTYPES = st.sampled_from(["FP32", "BYTES", "INT64", "BF16", "BOOL"])
LARGE = [[0, (1 << 63) - 1, 1 << 40], [1 << 59], [1 << 30, 1 << 29]]
TENSOR = st.tuples(
    TEXT, DTYPES, st.lists(st.integers(0, 1 << 15), max_size=3) | st.sampled_from(LARGE)
)
REF = st.tuples(U64, U64, U64, U32)
CONTEXTS = st.builds(
    RequestContext,
    flags=U64,
    correlation_text=st.none() | TEXT,
    shared=st.booleans(),
    parameters=TEXT,
)


@st.composite
def records(draw):
    tensors = draw(st.lists(TENSOR, max_size=12))
    refs = draw(st.lists(REF, min_size=len(tensors), max_size=len(tensors)))
    return draw(U32), tensors, refs, draw(CONTEXTS), draw(st.lists(TEXT, max_size=3)), draw(TEXT)


@pytest.fixture(params=["native", "python"], scope="module", autouse=True)
def implementation(request):
    if request.param == "native" and native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(records_room, "native", lambda: None)
        yield request.param


def encoded(record, *, word=0, named):
    ticket, tensors, refs, context, requested, identifier = record
    return record_encoder()(
        ticket,
        *encode_tensors(tensors, requested),
        [field for ref in refs for field in ref],
        word,
        identifier.encode() if named else b"",
        context.encoded(),
    )


def check(record, got):
    ticket, tensors, refs, context, requested, _ = record
    assert got.ticket == ticket
    assert [(s.name, s.datatype, s.rank) for s in got.signature.tensors] == [
        (name, dtype, len(shape)) for name, dtype, shape in tensors
    ]
    assert [list(shape) for shape in got.shapes] == [shape for _, _, shape in tensors]
    assert got.signature.requested == tuple(requested)
    assert [tuple(ref) for ref in got.refs] == refs
    assert got.context == context


@given(st.lists(st.tuples(U64, st.lists(records(), max_size=4)), max_size=4))
def test_requests_round_trip(batches):
    message = encode_frame(
        Kind.EXECUTE,
        [
            encode_batch(sequence, [encoded(record, named=True) for record in members])
            for sequence, members in batches
        ],
    )
    decoded = decode_execute(memoryview(message), record_reader(RequestContext))
    assert [batch.sequence for batch in decoded] == [sequence for sequence, _ in batches]
    for (_, members), batch in zip(batches, decoded, strict=True):
        for record, got in zip(members, batch.records, strict=True):
            check(record, got)
            assert got.identifier == record[-1]


@given(
    st.lists(
        st.tuples(
            st.tuples(U64, st.tuples(U64, U64, U64), U64),
            st.lists(st.tuples(records(), U32), max_size=4),
        ),
        max_size=4,
    )
)
def test_results_round_trip(batches):
    message = encode_frame(
        Kind.RESULTS,
        [
            encode_result_batch(
                *numbers, [encoded(record, word=word, named=False) for record, word in members]
            )
            for numbers, members in batches
        ],
    )
    decoded = decode_results(message, record_reader(RequestContext))
    for (numbers, members), batch in zip(batches, decoded, strict=True):
        times = (batch.started, batch.called, batch.ended)
        assert (batch.sequence, times, batch.copied) == numbers
        for (record, word), got in zip(members, batch.records, strict=True):
            check(record, got)
            assert got.word == word


def test_fields_of_a_reference():
    described = encode_tensors([("A", "UINT8", [3])])
    record = record_encoder()(5, *described, [11, 12, 3, 14])
    message = encode_frame(Kind.EXECUTE, [encode_batch(9, [record])])
    # The dims; region, offset, nbytes, lease: an order that both processes rely on.
    assert message.endswith(struct.pack("<qQQQI", 3, 11, 12, 3, 14))


SIGNATURE, DIMS = encode_tensors([("A", "FP32", [2])])
CONTEXT = RequestContext(flags=1, parameters="{}", shared=True).encoded()
GOOD = encode_frame(
    Kind.RESULTS,
    [
        encode_result_batch(
            1,
            (2, 2, 3),
            4,
            [record_encoder()(7, SIGNATURE, DIMS, [1, 2, 8, 4], ResponseFlag.ERROR, b"", CONTEXT)],
        )
    ],
)


@given(st.binary(max_size=200))
@example(struct.pack("<BxxxI", 18, 1) + struct.pack("<QQQQQI4x", 1, 2, 2, 3, 4, 1) + b"\xff" * 20)
@example(
    struct.pack("<BxxxI", 18, 1)
    + struct.pack("<QQQQQI4x", 1, 2, 2, 3, 4, 1)
    + struct.pack("<IIIIII", 1, 999, 1, 0, 1, 1)
    + SIGNATURE
)
def test_foreign_bytes_are_malformed_and_nothing_else(raw):
    for decode in (decode_results, decode_execute):
        for message in (raw, memoryview(GOOD[:8] + raw), memoryview(GOOD[:56] + raw)):
            try:
                decode(message, record_reader(RequestContext))
            except MalformedMessage:
                pass


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4))
def test_flipped_bytes_are_malformed_and_nothing_else(flips):
    message = bytearray(GOOD)
    for at, value in flips:
        message[at] = value
    try:
        decode_results(memoryview(message), record_reader(RequestContext))
    except MalformedMessage:
        pass


def test_every_cut_is_noticed_and_bytes_after_the_end():
    for length in range(8, len(GOOD)):
        with pytest.raises(MalformedMessage):
            decode_results(GOOD[:length], record_reader(RequestContext))
    with pytest.raises(MalformedMessage, match="1 bytes after its end"):
        decode_results(GOOD + b"\0", record_reader(RequestContext))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"t":5}',
        b'{"t":[5]}',
        b'{"t":[["A","FP32"]]}',
        b'{"t":[["A","NOPE",1]]}',
        b'{"t":[["A",["FP32"],1]]}',
        b'{"t":[[5,"FP32",1]]}',
        b'{"t":[["A","FP32",-1]]}',
        b'{"t":[["A","FP32",1.5]]}',
        b'{"t":[["A","FP32",true]]}',
        b'{"t":[["A","FP32",[1]]]}',
        b'{"t":[["A","FP32",4294967296]]}',
        b'{"t":[],"o":[5]}',
        b'{"t":[],"o":5}',
        b"[" * 100_000,
    ],
)
def test_bad_signatures_are_malformed(raw):
    with pytest.raises(MalformedMessage, match="signature"):
        SignatureCache()[raw]


def test_signatures_know_their_sizes():
    raw = encode_signature([("A", "FP64", 2), ("B", "BYTES", 1), ("C", "INT8", 0)])
    signature = SignatureCache()[raw]
    shapes = ((2, 3), (2,), ())
    tensors = zip(signature.tensors, shapes, strict=True)
    assert [spec.nbytes(shape) for spec, shape in tensors] == [48, None, 1]


def results_of(tensors, dims, refs):
    record = record_encoder()(0, encode_signature(tensors), dims, refs)
    return encode_frame(Kind.RESULTS, [encode_result_batch(1, (1, 1, 2), 0, [record])])


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ([-1], "negative dim"),
        ([0, -1], "negative dim"),
        ([-(1 << 63)], "negative dim"),
        ([1 << 61], "more bytes than 63 bits"),
        ([1 << 32, 1 << 32], "more bytes than 63 bits"),
        ([1 << 62, 1 << 62, 1 << 62], "more bytes than 63 bits"),
        ([], "a record of 0 dims came with a signature of"),
        ([1, 1, 1, 1, 1], "a record of 5 dims came with a signature of"),
    ],
)
def test_shapes_that_no_tensor_has_are_malformed(shape, error):
    rank = len(shape) if len(shape) in (1, 2, 3) else 2
    message = results_of([("A", "FP32", rank)], encode_dims([shape]), [0, 0, 0, 0])
    reader = record_reader(RequestContext)
    good = results_of([("A", "FP32", rank)], encode_dims([[1] * rank]), [0, 0, 0, 0])
    for _ in range(2):
        decode_results(good, reader)
        with pytest.raises(MalformedMessage, match=error):
            decode_results(message, reader)


def test_new_shapes_are_no_new_signatures():
    reader = record_reader(RequestContext)
    seen = []
    for count in (1, 2, 1, 3):
        message = results_of([("A", "FP32", 1)], encode_dims([[count]]), [0, 0, 4 * count, 0])
        ((batch,),) = [decode_results(message, reader)]
        seen.append((batch.records[0].signature, batch.records[0].shapes))
    assert len({id(signature) for signature, _ in seen}) == 1
    assert [shapes for _, shapes in seen] == [((1,),), ((2,),), ((1,),), ((3,),)]


def test_signatures_are_parsed_once_and_forgotten_when_they_are_many():
    cache = SignatureCache(limit=3)
    first = cache[SIGNATURE]
    assert cache[bytes(bytearray(SIGNATURE))] is first
    for number in range(10):
        assert cache[encode_signature([(str(number), "FP32", 1)])].tensors[0].name == str(number)
        assert len(cache) <= 3


@pytest.mark.parametrize(
    "raw", [b"\x03", b"\x03[]", b"\x03nope", b"\x03\xff", b"\x03" + b"[" * 99_999]
)
def test_bad_rare_messages_are_malformed(raw):
    with pytest.raises(MalformedMessage):
        decode_control(raw)


def test_rare_messages_round_trip():
    message = control_message(Kind.REGION, region=5, size=1 << 40, text="ä\0")
    assert message[0] == Kind.REGION
    assert decode_control(memoryview(message)) == {"region": 5, "size": 1 << 40, "text": "ä\0"}


SAID = st.text("aé\n", max_size=40)
SPOKEN = st.lists(
    st.tuples(st.builds(ResponseContext, parameters=SAID, error=SAID, code=st.none() | U32), TEXT),
    max_size=5,
)


@given(st.lists(SPOKEN, min_size=1, max_size=3), st.booleans())
def test_a_message_means_the_same_with_its_long_texts_set_aside(batches, in_batches):
    longest = 20
    reader = record_reader(ResponseContext)
    made = [
        [
            record_encoder()(1, *encode_tensors([(name, "FP32", [2])]), [1, 2, 3, 4], 5, b"", c)
            for context, name in spoken
            for c in [context.encoded()]
        ]
        for spoken in batches
    ]
    if in_batches:
        parts = [encode_result_batch(7, (1, 2, 3), 4, records) for records in made]
        message = encode_frame(Kind.RESULTS, parts)
    else:
        message = encode_responses(made[0], 9)
        batches = batches[:1]
    short, texts = set_long_texts_aside(message, longest)
    if in_batches:
        decoded = [batch.records for batch in decode_results(short, reader)]
    else:
        decoded = [decode_responses(short, reader)[0]]
    used = 0
    for spoken, records in zip(batches, decoded, strict=True):
        for (context, name), record in zip(spoken, records, strict=True):
            got = record.context
            assert [spec.name for spec in record.signature.tensors] == [name]
            if len(context.encoded()) > longest:
                assert got.set_aside == used
                taken = {field: str(text, "utf-8") for field, text in texts[used].items()}
                used += 1
                got = got.changed(set_aside=None, **taken)
            assert got == context
            assert all(len(text.encode()) <= longest for text in (record.context.error,))
    assert used == len(texts)


def test_a_malformed_message_is_left_as_it_is():
    context = ResponseContext(error="x" * 100)
    record = record_encoder()(1, *encode_tensors([]), [], 1, b"", context.encoded())
    whole = encode_responses([record], 0)
    for end in range(1, len(whole)):
        assert set_long_texts_aside(whole[:end], 10) == (whole[:end], [])
    marked = record_encoder()(
        1, *encode_tensors([]), [], 1, b"", context.changed(set_aside=0).encoded()
    )
    assert set_long_texts_aside(encode_responses([marked], 0), 10)[1] == []


@given(
    st.builds(
        ResponseContext, code=st.none() | U32, event=st.none() | U32, passed_on=st.booleans()
    ),
    st.sampled_from(["parameters", "error"]),
    st.lists(SAID),
)
def test_a_text_that_is_put_into_a_record_is_one_of_its_context(context, name, text):
    pieces = [part.encode() for part in text]
    parts = encode_tensors([("A", "FP32", [2])]), [1, 2, 3, 4]
    record = record_encoder()(1, *parts[0], parts[1], 5, b"", context.encoded())
    made = b"".join(with_long_text(record, name, pieces))
    message = encode_responses([made], 0)
    (got,), _ = decode_responses(message, record_reader(ResponseContext))
    assert got.context == context.changed(**{name: "".join(text)})
    assert got.word == 5
    assert [tuple(ref) for ref in got.refs] == [(1, 2, 3, 4)]
