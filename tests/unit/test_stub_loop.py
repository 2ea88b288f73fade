"""A stub's loop, as its server sees it: batches in, results out, in both runtimes."""

import ast
import json
import os
import re
import struct

import numpy as np
import pytest

from gpubridge.transport.calls import CallKind
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import ABANDONED
from gpubridge.transport.messages import Kind, ResponseFlag, control_message, encode_frame
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import encode_tensors
from tests.unit.looped_stub import CLAIMS, REGION, REGION_BYTES, started_stubs
from tests.unit.server_messages import encode_batch
from tests.waits import polling


@pytest.fixture(params=["native", "python"])
def start(request, tmp_path):
    yield from started_stubs(request.param, tmp_path)


def row(*values):
    return np.array([values], np.float32)


def test_requests_of_several_batches_are_answered_in_order(start):
    stub = start("data = data * 2")
    stub.send(
        [stub.record(0, row(1, 2)), stub.record(1, row(3))],
        [stub.record(2, row(4, 5, 6), identifier=b"id")],
        [],
    )
    results = stub.results(3)
    assert [result.sequence for result in results] == [1, 2, 3]
    answers = [[stub.array(record).tolist() for record in result.records] for result in results]
    assert answers == [[[[2, 4]], [[6]]], [[[8, 10, 12]]], []]
    assert [record.ticket for record in results[0].records] == [0, 1]
    for result in results:
        assert 0 < result.started <= result.called <= result.ended
        assert stub.page.lent[0] == 0
    assert [result.copied for result in results] == [12, 12, 0]
    assert (stub.page.started, stub.page.started_at) == (3, results[2].started)


def test_the_same_model_gets_other_shapes_datatypes_and_ids(start):
    stub = start("data = np.array([f'{data.tolist()} {request.request_id()}'.encode()], object)")
    asked = [
        (row(1), "FP32", b""),
        (np.zeros((2, 0), np.int64), "INT64", b"a"),
        (np.array(7, np.uint8), "UINT8", "\N{SNOWMAN}".encode()),
        (row(1, 2), "FP32", b"b"),
        (struct.pack("<I", 2) + b"hi", "BYTES", b""),
    ]
    told = []
    for array, datatype, identifier in asked:
        (record,) = stub.execute(stub.record(0, array, datatype=datatype, identifier=identifier))
        assert record.signature.tensors[0][:3] == ("OUT", "BYTES", 1)
        told.append(stub.data(record)[4:].decode())
    assert told == ["[[1.0]] ", "[[], []] a", "7 \N{SNOWMAN}", "[[1.0, 2.0]] b", "[b'hi'] "]


def test_answers_of_another_datatype_say_so(start):
    stub = start("data = data.astype(np.int32 if data[0, 0] else np.float32)")
    told = []
    for value in (0, 1, 0):
        (answer,) = stub.execute(stub.record(0, row(value)))
        told.append(answer.signature.tensors[0].datatype)
        stub.release(answer)
    assert told == ["FP32", "INT32", "FP32"]


def test_outputs_that_nobody_asked_for_are_not_sent(start):
    stub = start(
        "more = [pb_utils.Tensor(name, data) for name in ('OUT', 'OTHER', 'UNKNOWN')]",
        "return pb_utils.InferenceResponse(more)",
        outputs=("OUT", "OTHER"),
    )
    (every,) = stub.execute(stub.record(0, row(1)))
    assert [spec.name for spec in every.signature.tensors] == ["OUT", "OTHER"]
    (one,) = stub.execute(stub.record(0, row(1), requested=["OTHER"]))
    assert [spec.name for spec in one.signature.tensors] == ["OTHER"]
    (none,) = stub.execute(stub.record(0, row(1), requested=["NEITHER"]))
    assert (none.signature.tensors, none.word) == ((), 0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("data = data[:, ::-1]", row(2, 1)),
        ("data = np.asfortranarray(data.T)", row(1, 2).T),
        ("data = np.zeros((3, 0), np.float32)", np.zeros((3, 0), np.float32)),
        ("data = np.array(3, np.float32)", np.array(3, np.float32)),
        ("data = data.astype('>f4').newbyteorder() if False else data", row(1, 2)),
        (
            "return pb_utils.InferenceResponse([request.inputs()[0].from_dlpack('OUT', data)])",
            row(1, 2),
        ),
    ],
)
def test_arrays_of_any_layout_are_sent_as_they_look(start, body, expected):
    stub = start(body)
    (record,) = stub.execute(stub.record(0, row(1, 2)))
    assert np.array_equal(stub.array(record), expected)
    assert record.shapes[0] == expected.shape


def test_cancelled_requests_are_not_executed(start):
    stub = start("kept.append(1)", "data = np.array([[len(kept)]], np.float32)")
    records = [stub.record(ticket, row(1)) for ticket in (3, 4, 5)]
    stub.page.cancelled[4] = ABANDONED
    answers = {record.ticket: record for record in stub.execute(*records)}
    assert stub.array(answers[5]).tolist() == [[2]]
    assert answers[4].word == ResponseFlag.CANCELLED
    assert bytes(stub.page.lent[3:6]) == b"\0\0\0"
    stub.page.cancelled[3] = stub.page.cancelled[5] = ABANDONED
    answers = stub.execute(stub.record(3, row(1)), stub.record(4, row(1)), stub.record(5, row(1)))
    assert [record.word for record in answers] == [ResponseFlag.CANCELLED] * 3


def test_batches_that_the_server_has_withdrawn_are_not_executed(start):
    stub = start("kept.append(1)", "data = np.array([[len(kept)]], np.float32)")
    if not stub.page.claimed[0]:
        # Only the compiled runtime claims its batches, so the server withdraws nothing.
        assert stub.array(stub.execute(stub.record(0, row(1)))[0]).tolist() == [[1]]
        assert not stub.page.claimed[0]
        return
    stub.execute(stub.record(0, row(1)))
    assert stub.page.claimed[0] == CLAIMS | 1
    stub.page.claimed[0] = CLAIMS | 3
    stub.send(*([stub.record(ticket, row(1))] for ticket in (1, 2, 3)))
    skipped, too, executed = stub.results(3)
    assert [skipped.records[0].word, too.records[0].word] == [ResponseFlag.CANCELLED] * 2
    assert stub.array(executed.records[0]).tolist() == [[2]]
    assert stub.page.claimed[0] == CLAIMS | 4
    assert stub.page.progress[0] == 4
    # It is done with what it was lent for them.
    assert bytes(stub.page.lent[1:3]) == b"\0\0"


def test_a_kept_request_says_what_became_of_it(start):
    stub = start(
        "kept.append(request)",
        "told = [float(each.is_cancelled()) for each in kept]",
        "data = np.array([told], np.float32)",
    )
    (first,) = stub.execute(stub.record(0, row(1)))
    assert stub.array(first).tolist() == [[0]]
    assert stub.page.lent[0] == 1
    # The ticket is another request's by now: that one is cancelled while it is executed.
    (second,) = stub.execute(stub.record(1, row(1)))
    assert stub.array(second).tolist() == [[0, 0]]
    stub.page.cancelled[0] = stub.page.cancelled[1] = ABANDONED
    (third,) = stub.execute(stub.record(2, row(1)))
    assert stub.array(third).tolist() == [[0, 0, 0]]


def test_memory_stays_lent_while_the_model_looks_at_it(start):
    stub = start("if len(kept) < 2: kept.append(data)", "else: kept.clear()")
    for ticket in (0, 1):
        stub.execute(stub.record(ticket, row(ticket)))
    assert bytes(stub.page.lent[:2]) == b"\1\1"
    stub.execute(stub.record(2, row(2)))
    assert bytes(stub.page.lent[:3]) == b"\0\0\0"


def test_memory_that_small_responses_had_is_there_for_large_ones(start):
    stub = start("data = np.zeros((1, int(data[0, 0])), np.uint8)", output_limit=4 << 20)
    for _ in range(2):
        small = []
        for _ in range(60):
            (record,) = stub.execute(stub.record(0, row(60_000)))
            small.append(record)
        (refused,) = stub.execute(stub.record(0, row(3 << 20)))
        assert "shared memory arena is full" in stub.error(refused)
        for record in small:
            stub.release(record)
        (large,) = stub.execute(stub.record(0, row(3 << 20)))
        assert large.shapes == ((1, 3 << 20),)
        stub.release(large)


def test_responses_of_many_sizes_use_the_same_memory(start):
    stub = start("data = np.zeros((1, int(data[0, 0])), np.uint8)", output_limit=1 << 30)
    for number in range(60):
        (answer,) = stub.execute(stub.record(0, row(2_000_000 - number * 32_000)))
        stub.release(answer)
    assert sum(segment.size for segment in stub.segments.values()) < 10 << 20


def test_idle_output_memory_goes_back(start):
    stub = start()
    (record,) = stub.execute(stub.record(0, row(1)))
    (region,) = stub.segments
    stub.release(record)
    stub.channel.send(control_message(Kind.TRIM, idle_seconds=0))
    (record,) = stub.execute(stub.record(0, row(2)))
    assert region not in stub.segments
    assert stub.array(record).tolist() == [[2]]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return data", "Expected an 'InferenceResponse' object"),
        ("return pb_utils.InferenceResponse(error=pb_utils.TritonError('mine'))", "mine"),
    ],
)
def test_failures_are_the_answers_of_their_batch_only(start, body, text):
    stub = start(f"if data[0, 0] == 13: {body}")
    bad, fine = stub.record(0, row(13)), stub.record(1, row(1))
    stub.send([bad], [fine])
    failed, done = stub.results(2)
    assert text in stub.error(failed.records[0])
    assert stub.array(done.records[0]).tolist() == [[1]]
    assert bytes(stub.page.lent[:2]) == b"\0\0"


def test_parameters_of_responses_arrive(start):
    stub = start(
        "out = [pb_utils.Tensor('OUT', data)]",
        "return pb_utils.InferenceResponse(out, parameters={'a': 1})",
    )
    (record,) = stub.execute(stub.record(0, row(5)))
    assert json.loads(record.context.parameters) == {"a": 1}
    assert stub.array(record).tolist() == [[5]]


def test_properties_of_a_request_arrive(start):
    stub = start(
        "said = [request.flags(), request.correlation_id(), request.timeout(), request.parameters()]",
        "said += [request._trace._identifier, data.tolist()]",
        "data = np.array([repr(said).encode()], object)",
    )
    context = RequestContext(
        flags=3, correlation_id=7, timeout=5_000_000, parameters='{"ä":1}', trace=2**63
    )
    named = RequestContext(correlation_text="säule", flags=2**32 - 1)
    expected = [
        [3, 7, 5_000_000, '{"ä":1}', 2**63, [[1]]],
        [2**32 - 1, "säule", 0, "{}", 0, [[2]]],
        [0, 0, 0, "{}", 0, [[3]]],
    ]
    told = stub.execute(
        stub.record(0, row(1), context=context),
        stub.record(1, row(2), context=named),
        stub.record(2, row(3)),
    )
    assert [ast.literal_eval(stub.data(record)[4:].decode()) for record in told] == expected


def test_control_inputs_are_each_requests_own(start):
    stub = start(
        "given = [(t.name(), t.as_numpy().dtype.name, t.as_numpy().tolist()) for t in request.inputs()]",
        "request.inputs()[1].as_numpy()[:] = 9",
        "request.inputs()[2].as_numpy()[:] = 9",
        "data = np.array([repr(given).encode()], object)",
    )
    controls = [["START", "FP32", [1], 1.0], ["ID", "UINT64", [1, 1], 2**64 - 1]]
    texts = [*controls, ["TEXT", "BYTES", [1], "äß"]]
    numbers = [("START", "float32", [1.0]), ("ID", "uint64", [[2**64 - 1]])]
    given = [("IN", "float32", [[5]]), *numbers]
    for told, expected in (
        (controls, given),
        (controls, given),
        (texts, [*given, ("TEXT", "object", ["äß".encode()])]),
        (texts, [*given, ("TEXT", "object", ["äß".encode()])]),
    ):
        context = RequestContext(controls=told)
        (record,) = stub.execute(stub.record(0, row(5), context=context))
        assert ast.literal_eval(stub.data(record)[4:].decode()) == expected
        stub.release(record)


@pytest.mark.parametrize("raw", [b"\1", b"\0\0\0\x80", b"\x10\0\0\0\4\0\0\0\xff\xff\xff\xff"])
def test_a_malformed_context_ends_the_stub(start, raw):
    stub = start()
    signature, dims = encode_tensors([("IN", "FP32", (1,))])
    record = record_encoder()(0, signature, dims, [REGION, 0, 4, 0], context=raw)
    stub.send([record])
    assert stub.process.wait(30) != 0


OPEN = ResponseFlag.OPEN
EMPTY = ResponseFlag.EMPTY


def test_a_decoupled_model_sends_responses_of_any_kind(start):
    stub = start(
        "sender = request.get_response_sender()",
        "respond = lambda data, **said: sender.send(",
        "    pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data)], **said))",
        "respond(data)",
        "respond(np.tile(data, 50_000))",
        "respond(data * 2, parameters={'last': False})",
        "respond(data, error=pb_utils.TritonError('no'))",
        "sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data + 1)]), 1)",
        decoupled=True,
    )
    stub.send([stub.record(0, row(3))])
    small, large, told, error, last = stub.responses(5)
    assert [record.word for record in (small, large, told, last)] == [OPEN, OPEN, OPEN, 0]
    assert stub.array(small).tolist() == [[3]]
    assert stub.array(large).tolist() == [[3] * 50_000]
    assert stub.array(told).tolist() == [[6]]
    assert json.loads(told.context.parameters) == {"last": False}
    assert (error.word, error.context.error) == (OPEN | ResponseFlag.ERROR, "no")
    assert stub.array(last).tolist() == [[4]]
    (result,) = stub.results(1)
    assert [record.word for record in result.records] == [OPEN | EMPTY]


def test_threads_of_a_decoupled_model_send_at_the_same_time(start):
    stub = start(
        "sender = request.get_response_sender()",
        "def send():",
        "    for index in range(40):",
        "        out = pb_utils.Tensor('OUT', np.full(1 + index % 3, data[0, 0]))",
        "        sender.send(pb_utils.InferenceResponse([out]))",
        "    sender.send(flags=1)",
        "threading.Thread(target=send).start()",
        decoupled=True,
    )
    stub.send([stub.record(ticket, row(ticket)) for ticket in range(8)])
    seen = {ticket: [] for ticket in range(8)}
    for record in stub.responses(8 * 41):
        if record.word & EMPTY:
            assert len(seen[record.ticket]) == 40
            continue
        seen[record.ticket].append(stub.array(record).tolist())
        stub.release(record)
    assert seen == {ticket: [[ticket] * (1 + i % 3) for i in range(40)] for ticket in range(8)}


def test_a_request_that_two_threads_ask_for_its_sender_at_once_has_one_end(start):
    stub = start(
        "from gpubridge.stub.response_stream import RequestHandle",
        "made, both = RequestHandle.__init__, threading.Barrier(2, timeout=20)",
        "def make(origin, *arguments):",
        "    both.wait()",
        "    made(origin, *arguments)",
        "RequestHandle.__init__ = make",
        "def send():",
        "    sender = request.get_response_sender()",
        "    RequestHandle.__init__ = made",
        "    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data)]), 1)",
        "threading.Thread(target=send).start()",
        decoupled=True,
    )
    stub.send([stub.record(0, row(1))])
    (first,) = stub.responses(1)
    stub.send([stub.record(1, row(2))])
    (second,) = stub.responses(1)
    assert [(each.ticket, each.word) for each in (first, second)] == [(0, 0), (1, 0)]


def test_a_request_that_a_decoupled_model_drops_ends(start):
    stub = start("if data[0, 0] == 1: request.get_response_sender()", decoupled=True)
    stub.send([stub.record(0, row(0)), stub.record(1, row(1))])
    for record in stub.responses(2):
        assert "dropped this request without sending a response" in stub.error(record)
    assert bytes(stub.page.lent[:2]) == b"\0\0"


def test_a_sender_answers_one_request_of_a_batch(start):
    stub = start(
        "if data[0, 0] == 1:",
        "    sender = request.get_response_sender()",
        "    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data * 10)]), 1)",
        "    return None",
    )
    stub.send([stub.record(0, row(1)), stub.record(1, row(2))])
    kinds = []
    while Kind.RESULTS not in kinds:
        kinds.append(stub._receive()[0])
    assert kinds.count(Kind.RESPONSES) == 1


def test_after_none_only_those_answer_whose_senders_were_taken(start):
    stub = start(
        "global silent",
        "silent = True",
        "if data[0, 0] == 1:",
        "    sender = request.get_response_sender()",
        "    response = pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data * 10)])",
        "    threading.Timer(0.05, sender.send, (response, 1)).start()",
    )
    stub.send([stub.record(0, row(1)), stub.record(1, row(2))])
    sent, dropped = stub.answers(0, 1)
    assert stub.array(sent).tolist() == [[10]]
    assert "Expected a list in the execute return" in stub.error(dropped)


def test_outputs_in_place_and_large_inputs_take_the_same_way_as_ever(start):
    stub = start(
        "if data.size > 1000: return pb_utils.InferenceResponse([tensor.from_dlpack('OUT', data)])",
        "out = request.output('OUT', data.shape, np.float32)",
        "out.as_numpy()[:] = data + 1",
        "return pb_utils.InferenceResponse([out])",
    )
    large = np.arange(40_000, dtype=np.float32)[None]
    (passed,) = stub.execute(stub.record(0, large, at=1 << 20))
    # The model's own input is its output: nothing is copied, and the lease has ended.
    assert passed.refs[0] == (REGION, 1 << 20, large.nbytes, 0)
    stub.send([stub.record(1, row(1))])
    (result,) = stub.results(1)
    assert (stub.array(result.records[0]).tolist(), result.copied) == ([[2]], 0)


def test_a_slow_batch_does_not_hold_up_the_result_before_it(start):
    stub = start(
        "import time",
        "if data[0, 0]: time.sleep(0.02)",
        "if data[0, 0] == 2:",
        f"    {polling('request.is_cancelled()')}",
    )
    stub.execute(stub.record(0, row(1)))
    stub.send([stub.record(1, row(0))], [stub.record(2, row(2))])
    (first,) = stub.results(1)
    assert first.sequence == 2
    stub.page.cancelled[2] = ABANDONED
    (second,) = stub.results(1)
    assert second.sequence == 3


def test_messages_beyond_a_datagram_are_executed(start):
    stub = start()
    identifier = b"x" * 70_000
    records = [stub.record(ticket, row(ticket), identifier=identifier) for ticket in range(3)]
    answers = stub.execute(*records)
    assert [stub.array(record).item() for record in answers] == [0, 1, 2]


def test_answers_beyond_a_datagram_arrive(start):
    names = [f"OUTPUT_WITH_A_LONG_NAME_{number:04}" for number in range(2000)]
    stub = start(
        f"out = [pb_utils.Tensor(n, data) for n in {names!r}]",
        "return pb_utils.InferenceResponse(out)",
        outputs=names,
    )
    (record,) = stub.execute(stub.record(0, row(9)))
    assert len(record.refs) == 2000
    assert stub.data(record, 1999) == row(9).tobytes()


@pytest.mark.parametrize("cut", [9, 30, 60, -1])
def test_a_message_that_ends_too_early_ends_the_stub(start, cut):
    stub = start()
    message = encode_frame(Kind.EXECUTE, [encode_batch(1, [stub.record(0, row(1))])])
    stub.channel.send(message[:cut])
    assert stub.process.wait(30) != 0


def test_memory_that_was_never_announced_is_refused(start):
    stub = start()
    signature, dims = encode_tensors([("IN", "FP32", (1,))])
    stub.page.lent[0] = 1
    for ref in ([99, 0, 4, 0], [REGION, REGION_BYTES, 4, 0]):
        (record,) = stub.execute(record_encoder()(0, signature, dims, ref))
        assert "do not exist" in stub.error(record)


def test_a_forked_child_leaves_what_is_shared_alone(start):
    stub = start("child = os.fork()", "if child: os.waitpid(child, 0)")
    (record,) = stub.execute(stub.record(0, row(4)))
    assert stub.array(record).tolist() == [[4]]
    (record,) = stub.execute(stub.record(0, row(5)))
    assert stub.array(record).tolist() == [[5]]
    assert stub.process.poll() is None


def test_the_end_of_the_channel_ends_the_stub(start):
    stub = start()
    stub.execute(stub.record(0, row(1)))
    assert stub.close() == 0


def finalized(stub):
    """Wait until the stub has finalized its model."""
    stub.channel.send(control_message(Kind.FINALIZE))
    while stub._receive()[0] != Kind.FINALIZED:
        pass
    return stub.process.wait(30) == 0


def test_finalize_is_answered(start):
    stub = start()
    stub.execute(stub.record(0, row(1)))
    assert finalized(stub)


WAITS = """
import asyncio
import triton_python_backend_utils as pb_utils

say = pb_utils.Logger.log_info

class TritonPythonModel:
    async def execute(self, requests):
        try:
            say("waits")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            say("cleans up")
            {then}

    def finalize(self):
        say("finalize")
"""


@pytest.mark.parametrize(
    ("then", "error"),
    [
        ("pass", "CancelledError"),
        ("await asyncio.Event().wait()", "goes on though it was cancelled"),
    ],
)
def test_a_coroutine_that_is_given_up_cleans_up_before_finalize(start, then, error):
    logged, stdout = os.pipe()
    stub = start(model=WAITS.format(then=then), stdout=stdout)
    os.close(stdout)
    stub.page.log_levels = 255
    stub.send([stub.record(0, row(1))])
    text = b""
    while b"\0waits" not in text:
        text += os.read(logged, 4096)
    stub.calls.send(control_message(CallKind.GIVEN_UP))
    (result,) = stub.results(1)
    assert error in stub.error(result.records[0])
    assert finalized(stub)
    with os.fdopen(logged, "rb") as rest:
        text += rest.read()
    assert re.findall(rb"\0(waits|cleans up|finalize)\b", text) == [
        b"waits",
        b"cleans up",
        b"finalize",
    ]
