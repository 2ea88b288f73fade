"""What a model returns, raises and is: its own objects stay its own, whatever it does with them meanwhile."""

import itertools
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpubridge.stub import signal_handlers
from gpubridge.stub.batches import BatchRunner
from gpubridge.stub.signal_handlers import SignalHandlers, _Held
from gpubridge.transport.channel import ChannelClosed
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import ABANDONED
from gpubridge.transport.messages import Kind, ResponseFlag
from tests.unit.looped_stub import started_stubs
from tests.unit.server_messages import decode_responses, decode_results

SHARED = RequestContext(shared=True)
HEAD = """
import signal
import numpy as np
import triton_python_backend_utils as pb_utils

def number(request):
    return float(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0, 0])

def answer(*values):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([values], np.float32))])

class TritonPythonModel:
"""
SAME_LIST = """
    def initialize(self, args):
        self.answers = [answer(7), answer(8)]
    def execute(self, requests):
        return self.answers
"""
# Whatever it returned is looked at while the next answers are made.
CHANGED_LIST = """
    def execute(self, requests):
        class Name(str):
            def __hash__(self):
                answers.clear()
                return str.__hash__(self)
        answers = [answer(number(each)) for each in requests]
        for each in answers:
            each._tensors[0]._name = Name("OUT")
        return answers
"""
CHANGED_TENSORS = """
    def execute(self, requests):
        class Name(str):
            def __hash__(self):
                self.of._tensors.clear()
                self.of.__init__([])
                return str.__hash__(self)
        answers = [answer(number(each)) for each in requests]
        for each in answers:
            name = each._tensors[0]._name = Name("OUT")
            name.of = each
        return answers
"""
# The name of the last output makes the first one, which was looked at already, a tensor of something else.
CHANGED_KINDS = """
    def execute(self, requests):
        class Name(str):
            def __hash__(self):
                self.of._tensors[0].__init__("OUT", np.zeros((3, 5), np.int64))
                return str.__hash__(self)
        answers = [answer(number(each)) for each in requests]
        for each in answers:
            name = Name("DROPPED")
            name.of = each
            last = pb_utils.Tensor("DROPPED", np.zeros(1, np.float32))
            last._name = name
            each._tensors.append(last)
        return answers
"""
REPLACED_ON_ITSELF = """
    def execute(self, requests):
        self.execute = self.second
        return [answer(1) for _ in requests]
    def second(self, requests):
        TritonPythonModel.third = lambda self, requests: [answer(3) for _ in requests]
        self.execute = self.third
        return [answer(2) for _ in requests]
"""
REPLACED_ON_ITS_CLASS = REPLACED_ON_ITSELF.replace("self.execute =", "TritonPythonModel.execute =")
REPLACED_ON_ITS_CLASS = REPLACED_ON_ITS_CLASS.replace("= self.", "= TritonPythonModel.")
INTERRUPTED = """
    def initialize(self, args):
        def boom(*_):
            raise {error}
        signal.signal(signal.SIGALRM, boom)
    def execute(self, requests):
        return [answer(number(each)) for each in requests]
"""
WRITING = """
    calls = 0
    kept = []
    def execute(self, requests):
        self.calls += 1
        return [self.one(each) for each in requests]
    def one(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        data = tensor.as_numpy()
        if data[0, 0] >= 2:
            self.kept.append(request)
        if data[0, 0] == 3:
            request.get_response_sender()
        if data[0, 0] >= 1:
            {write}
        return answer(data[0, 0], self.calls)
"""


@pytest.fixture(params=["native", "python"])
def start(request, tmp_path):
    yield from started_stubs(request.param, tmp_path)


def row(*values):
    return np.array([values], np.float32)


def executed(stub, *numbers, context=None):
    """Execute one batch of requests of a number each; returns the answers as lists, or as texts."""
    context = RequestContext() if context is None else context
    records = stub.execute(
        *(stub.record(i, row(n), context=context) for i, n in enumerate(numbers))
    )
    answers = []
    for record in records:
        if record.word & ResponseFlag.ERROR:
            answers.append(record.context.error)
        else:
            answers.append(stub.array(record).ravel().tolist())
            stub.release(record)
    return answers


def wait_until_asleep(pid):
    """Wait until a process waits for a message."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        os.sched_yield()


def test_a_list_that_the_model_keeps_is_returned_again_and_again(start):
    stub = start(model=HEAD + SAME_LIST)
    for _ in range(3):
        assert executed(stub, 1, 2) == [[7], [8]]
    assert "Number of InferenceResponse objects" in executed(stub, 1)[0]
    assert executed(stub, 1, 2) == [[7], [8]]


@pytest.mark.parametrize("model", [CHANGED_LIST, CHANGED_TENSORS])
def test_what_was_returned_may_change_while_it_is_sent(start, model):
    stub = start(model=HEAD + model)
    assert executed(stub, 1, 2, 3) == [[1], [2], [3]]
    assert executed(stub, 4, 5) == [[4], [5]]


def test_a_tensor_is_sent_as_it_was_when_its_response_was_looked_at(tmp_path):
    for stub in started_stubs("native", tmp_path):
        ready = stub(model=HEAD + CHANGED_KINDS)
        assert executed(ready, 1, 2) == [[1], [2]]
        assert executed(ready, 3) == [[3]]


def test_an_array_that_was_resized_since_fails_its_own_response(start):
    stub = start(
        "made = pb_utils.Tensor('OUT', data)",
        "if data[0, 0] > 1:",
        "    grown = np.ones((1, 1), np.float32)",
        "    made = pb_utils.Tensor('OUT', grown)",
        "    grown.resize((1, int(data[0, 0]) - 2), refcheck=False)",
        "return pb_utils.InferenceResponse([made])",
    )
    for _ in range(2):
        first, more, fewer, last = executed(stub, 0, 4, 2, 1)
        assert (first, last) == ([0], [1])
        assert "'OUT': expected the 4 bytes of FP32 [1, 1], of which it was made, got 8" in more
        assert "got 0" in fewer


@pytest.mark.parametrize("made", ["Tensor", "InferenceResponse"])
def test_an_object_without_its_initialization_is_an_error(start, made):
    stub = start(
        f"if data[0, 0] == 1: made = pb_utils.{made}.__new__(pb_utils.{made})",
        "if data[0, 0] == 1 and isinstance(made, pb_utils.Tensor):",
        "    return pb_utils.InferenceResponse([made])",
        "if data[0, 0] == 1: return made",
    )
    failed, done = executed(stub, 1, 2)
    assert "AttributeError" in failed
    assert done == [2]


def test_a_call_with_a_tensor_without_its_initialization_is_an_error(start):
    stub = start(
        "made = pb_utils.Tensor.__new__(pb_utils.Tensor)",
        "called = pb_utils.InferenceRequest(",
        "    model_name='other', requested_output_names=['OUT'], inputs=[made])",
        "called.exec()",
    )
    assert "AttributeError" in executed(stub, 1)[0]


@pytest.mark.parametrize("size", [65_536, 262_144])
def test_without_memory_for_an_output_its_request_fails_alone(start, size):
    stub = start("kept[:] = [data]", output_limit=8 << 20)
    held = []
    while True:
        ticket = len(held) % 2
        data = np.full((1, size), 7, np.uint8)
        (record,) = stub.execute(stub.record(ticket, data, datatype="UINT8", at=ticket << 20))
        if record.word & ResponseFlag.ERROR:
            break
        held.append(record)
    assert "is full" in stub.error(record)
    for record in held:
        assert stub.data(record) == bytes([7]) * size
        stub.release(record)
    (record,) = stub.execute(stub.record(0, data, datatype="UINT8"))
    assert stub.data(record) == bytes([7]) * size


@pytest.mark.parametrize("size", [4096, 65_536, 65_537, 262_144])
def test_outputs_have_a_place_however_many_wait(start, size):
    """The model keeps its last input, which is its output: it cannot stay where it is."""
    stub = start("kept[:] = [data]", output_limit=1 << 30)
    count = 600 if size <= 65_536 else 40
    held = []
    for index in range(count):
        value = index % 256
        data = np.full((1, size), value, np.uint8)
        # The model still has the input before this one.
        ticket = index % 2
        (record,) = stub.execute(stub.record(ticket, data, datatype="UINT8", at=ticket << 20))
        assert not record.word & ResponseFlag.ERROR, stub.error(record)
        held.append(record)
    for index, record in enumerate(held):
        assert stub.data(record) == bytes([index % 256]) * size
        stub.release(record)
    (record,) = stub.execute(stub.record(0, np.full((1, size), 9, np.uint8), datatype="UINT8"))
    assert stub.data(record) == bytes([9]) * size


@pytest.mark.parametrize("model", [REPLACED_ON_ITSELF, REPLACED_ON_ITS_CLASS])
def test_its_method_is_the_one_that_it_has_now(start, model):
    stub = start(model=HEAD + model)
    assert [executed(stub, 0)[0] for _ in range(4)] == [[1], [2], [3], [3]]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("TimeoutError('late')", "TimeoutError: late"),
        ("ConnectionResetError(104, 'gone')", "gone"),
        ("SystemExit(3)", "SystemExit: 3"),
        ("KeyboardInterrupt('stop')", "KeyboardInterrupt: stop"),
    ],
)
def test_what_a_signals_handler_raises_while_it_waits_the_next_batch_gets(start, error, text):
    stub = start(model=HEAD + INTERRUPTED.format(error=error))
    assert executed(stub, 1) == [[1]]
    for times in (1, 3):
        for _ in range(times):
            wait_until_asleep(stub.process.pid)
            os.kill(stub.process.pid, signal.SIGALRM)
        wait_until_asleep(stub.process.pid)
        assert text in executed(stub, 2, 3)[1]
        assert executed(stub, 4) == [[4]]


INTERRUPTED_OFTEN = """
    timer = None
    def initialize(self, args):
        def boom(*_):
            raise {error}
        signal.signal(signal.SIGALRM, boom)
        self.same = signal.getsignal(signal.SIGALRM) is boom
    def execute(self, requests):
        self.timer = self.timer or signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        return [answer(number(each) * self.same) for each in requests]
"""


def test_a_stub_outlives_what_a_signals_handler_raises_again_and_again(start):
    stub = start(model=HEAD + INTERRUPTED_OFTEN.format(error="TimeoutError('late')"))
    late = 0
    for count in range(1, 2000):
        answers = executed(stub, count, 1)
        failed = ["late" in str(answer) for answer in answers]
        assert all(failed) or answers == [[count], [1]]
        late += any(failed)
        if late > 20 and count > 300:
            break
    assert late > 20


def test_wherever_a_signal_comes_its_handler_runs_in_the_models_code():
    def boom(*_):
        raise TimeoutError

    signals = SignalHandlers()
    signals.in_model = False
    handler = _Held(signals, boom)

    def trace(frame, event, arg):
        if frame.f_code.co_filename != signal_handlers.__file__:
            return None
        frame.f_trace_opcodes = True
        if next(steps) == at:
            handler(signal.SIGALRM, frame)
        return trace

    tracing = sys.gettrace()
    outcomes = []
    for at in range(200):
        steps = itertools.count()
        sys.settrace(trace)
        try:
            outcomes.append(signals.call(lambda: 5))
        except TimeoutError:
            outcomes.append("late")
        finally:
            sys.settrace(tracing)
        assert not signals.in_model
        if signals.held:
            with pytest.raises(TimeoutError):
                signals.call(lambda: 5)
            outcomes[-1] = "held"
        if next(steps) < at:
            break
    assert set(outcomes) == {"late", "held", 5}
    assert outcomes[-1] == 5


@pytest.mark.parametrize(
    ("error", "raised"),
    [(TimeoutError("late"), TimeoutError), (OSError(104, "gone"), ChannelClosed)],
)
def test_an_error_that_is_not_the_channels_does_not_end_it_silently(error, raised):
    def next_message():
        raise error

    batches = BatchRunner(None, None, None, 0)
    batches._loop = SimpleNamespace(next_message=next_message)
    with pytest.raises(raised):
        batches.receive(None, None)


def test_a_request_that_is_kept_beyond_a_failure_says_what_became_of_it(start):
    stub = start(
        "if data[0, 0] == 13:",
        "    kept.append(request)",
        "    raise ValueError('no')",
        "data = np.array([[each.is_cancelled() for each in kept]], np.float32)",
    )
    assert "ValueError: no" in executed(stub, 13)[0]
    # The ticket is another request's by now, which is cancelled while it is executed.
    stub.page.cancelled[0] = ABANDONED
    (record,) = stub.execute(stub.record(1, row(1)))
    assert stub.array(record).tolist() == [[0]]


@pytest.mark.parametrize("ending", ["", "    raise ValueError('no')"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_the_sender_of_a_request_that_is_answered_is_closed(start, ending, decoupled):
    """It would answer the request that has the ticket by then."""
    stub = start(
        "if not kept:",
        "    kept.append(request)",
        *([ending or "    data = data + 1"] if not decoupled or ending else ["    raise KeyError"]),
        "else:",
        "    sender = kept[0].get_response_sender()",
        "    try:",
        "        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data * 9)]), 1)",
        "    except pb_utils.TritonModelException as error:",
        "        data = np.array([str(error).encode()], object)",
        "    if silent:",
        "        sender = request.get_response_sender()",
        "        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data)]), 1)",
        decoupled=decoupled,
    )
    stub.execute(stub.record(0, row(1)))
    stub.page.cancelled[0] = 0
    stub.send([stub.record(0, row(2))])
    (told,) = stub.responses(1) if decoupled else stub.results(1)[0].records
    assert b"Response sender has been closed" in stub.data(told)


@pytest.mark.parametrize("ending", ["return None", "return [None] * len(requests)"])
def test_a_request_that_is_kept_is_answered_by_a_sender_that_is_taken_later(start, ending):
    stub = start(
        model=f"""{HEAD}
    kept = []
    def execute(self, requests):
        if number(requests[0]) == 1:
            self.kept += requests
            {ending}
        if number(requests[0]) == 2:
            self.kept.pop().get_response_sender().send(answer(7), 1)
        self.kept.clear()
        return [answer(2) for _ in requests]
"""
    )
    open_ = stub.execute(*(stub.record(i, row(1)) for i in range(3)))
    assert {record.word for record in open_} == {ResponseFlag.OPEN | ResponseFlag.EMPTY}
    stub.send([stub.record(3, row(2))])
    # The last one is answered then, and the others are dropped.
    *dropped, sent = stub.answers(0, 1, 2)
    assert stub.array(sent).tolist() == [[7]]
    for record in dropped:
        assert "found type '<class 'NoneType'>'" in stub.error(record)


def test_what_is_raised_after_the_only_response_takes_nothing_from_it(start):
    stub = start(
        "sender = request.get_response_sender()",
        "kept.append(sender)",
        "response = pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data)])",
        "sender.send(response)",
        "sender.send(response)",
    )
    stub.send([stub.record(0, row(5))])
    (sent,) = stub.responses(1)
    assert stub.array(sent).tolist() == [[5]]
    assert stub.answers(0)[0].word == ResponseFlag.EMPTY


def test_a_sender_that_a_model_deletes_itself_ends_its_request_once(start):
    stub = start(
        "sender = request.get_response_sender()",
        "sender.__del__()",
        "try:",
        "    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data)]), 1)",
        "except pb_utils.TritonModelException as error:",
        "    kept.append(str(error))",
        "del sender",
        "request._handle.__del__()",
        decoupled=True,
    )
    stub.send([stub.record(0, row(1))], [stub.record(1, row(1))])
    ended, results = [], 0
    while results < 2:
        message = stub._receive()
        if message[0] == Kind.RESULTS:
            results += len(decode_results(message, stub._reader))
        elif message[0] == Kind.RESPONSES:
            ended += decode_responses(message, stub._reader)[0]
    assert [record.ticket for record in ended] == [0, 1]
    assert all("dropped this request" in stub.error(record) for record in ended)


RAISES = "data[0, 0] += 10"
TELLS = """
            try:
                data[0, 0] += 10
            except ValueError as error:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
"""


def learned(start, write):
    """Start a model that has left shared inputs as they were, and so gets read-only ones."""
    stub = start(model=HEAD + WRITING.format(write=write))
    for _ in range(20):
        executed(stub, 0, context=SHARED)
    return stub


@pytest.mark.parametrize("write", [RAISES, TELLS])
def test_a_batch_that_writes_to_shared_inputs_is_run_again_with_copies(start, write):
    stub = learned(start, write)
    assert executed(stub, 0, 1, context=SHARED) == [[0, 22], [11, 22]]
    assert any("gets copies of them from now on" in text for text in stub.notices)
    assert bytes(stub.region.view[4096:4100]) == row(1).tobytes(), "others look at it, too"
    assert executed(stub, 1, context=SHARED) == [[11, 23]]
    assert bytes(stub.page.lent[:2]) == b"\0\0"


def test_memory_that_the_second_run_keeps_stays_lent(start):
    stub = learned(start, RAISES)
    assert executed(stub, 2, context=SHARED) == [[12, 22]]
    # Requests of both runs are kept.
    assert stub.page.lent[0] == 1


def test_a_batch_with_a_sender_is_not_run_again(start):
    stub = learned(start, RAISES)
    (told,) = executed(stub, 3, context=SHARED)
    assert "read-only" in told
    assert executed(stub, 1, context=SHARED) == [[11, 22]]
