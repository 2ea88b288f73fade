"""The order between stubs on a GPU: nobody waits but streams, and one missing wait would be wrong data."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpubridge.transport.control import EVENTS
from tests.process.device_models import (
    DOUBLE,
    SMALL_ARENA,
    running_device_server,
    write_device_model,
)
from tests.process.gated_models import CONSUMER, MAKER, Gate, calling, decoupled
from tests.process.server import wait_until, write_model
from tests.process.test_device_edges import HOST, ensemble

COUNT = 1000
DECOUPLED = "model_transaction_policy { decoupled: true }"
# More than half of an arena of 2 MiB.
LARGE = 300_000
NOT_SUPPORTED = 801

# Takes a bare capsule, which has no stream, and reads on a stream that nobody knows.
BARE = (
    CONSUMER
    + """
    def taken(self, given, library):
        given.to_dlpack()
        mark("complete")
        return given._device_bytes.pointer
"""
)

# An allocation waits for the arena for as long as a busy machine needs to release a slot.
PATIENT = """
import gpubridge.stub.device.memory

gpubridge.stub.device.memory._ALLOCATION_SECONDS = 100
"""

# Doubles its input where it lies, on its own stream, and has another model double it again.
EDITOR = (
    CONSUMER
    + """
    def answer(self, request):
        given = request.inputs()[0]
        source = self.taken(given, self.fast)
        self.fast.memory = {}
        self.fast.launch(pass_gate)
        self.fast.double(source, source, int(np.prod(given.shape())))
        answer = pb_utils.InferenceRequest(
            model_name="consumer", requested_output_names=["OUT"],
            inputs=[given]).exec()
        return answer.output_tensors()[0]
"""
)


@pytest.fixture(scope="module")
def served(repository):
    for name in ("maker", "other_maker"):
        write_device_model(repository, name, MAKER)
    write_device_model(repository, "sender", decoupled(MAKER), config=DECOUPLED)
    for name in ("consumer", "other_consumer"):
        write_device_model(repository, name, CONSUMER)
    write_device_model(repository, "bare", BARE)
    write_device_model(repository, "editor", EDITOR)
    for name in ("last", "other_last"):
        write_device_model(repository, name, DOUBLE)
    write_device_model(repository, "call_with", calling(MAKER, "consumer"))
    write_device_model(repository, "call_host", calling(MAKER, "host"))
    write_device_model(repository, "call_maker", calling(CONSUMER, "maker"))
    write_model(repository, "host", HOST, config="instance_group [{ kind: KIND_CPU }]")
    ensemble(repository, "members", ["maker", "consumer", "last"])
    write_device_model(repository, "call_sender", calling(CONSUMER, "sender", decoupled=True))
    ensemble(repository, "decoupled_member", ["sender", "consumer"])
    call_members = calling(CONSUMER, "decoupled_member", decoupled=True)
    write_device_model(repository, "call_members", call_members)
    ensemble(repository, "others", ["maker", "other_consumer", "other_last"])
    ensemble(repository, "too_many", ["other_maker", "other_consumer", "last"])
    ensemble(repository, "bare_capsule", ["maker", "bare", "last"])
    ensemble(repository, "edited", ["maker", "editor", "last"])
    with running_device_server(repository, delay_us=0) as served:
        yield served


@pytest.fixture
def gate(served, repository):
    gates = []

    def make(model):
        gates.append(Gate(repository, model, served.server))
        return gates[-1]

    yield make
    for each in gates:
        each.open()


def values(count=COUNT):
    return np.random.default_rng().random(count, np.float32)


# Whose kernel is held; who must have begun, or have its answer, meanwhile; what comes of a value.
EDGES = {
    "members": ("maker", "consumer", "made", 8),
    "call_sender": ("sender", "call_sender", "answered", 2),
    "call_members": ("sender", "call_members", "answered", 4),
    "call_with": ("call_with", "call_with", "answered", 4),
    "call_maker": ("maker", "call_maker", "answered", 2),
}


@pytest.mark.parametrize("model", EDGES)
def test_a_consumer_is_handed_what_is_still_to_be_computed(served, gate, model):
    held, goes_on, how_far, factor = EDGES[model]
    held, goes_on = gate(held), gate(goes_on)
    for _ in range(2):
        given = values()
        goes_on.forget()
        held.hold()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.infer, model, given)
            # Both models are through with their part while the first kernel has not begun.
            goes_on.wait_for(how_far)
            held.open()
            assert answer.result() == (200, (factor * given).tolist())


def test_a_model_on_the_host_gets_what_is_complete(served, gate):
    given, held = values(), gate("call_host")
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.infer, "call_host", given)
        held.wait_for("made")
        time.sleep(0.1)
        held.open()
        assert answer.result() == (200, (4 * given).tolist())


def test_a_bare_capsule_is_handed_out_when_its_data_is_complete(served, gate):
    given, held, consumer = values(), gate("maker"), gate("bare")
    held.hold()
    with ThreadPoolExecutor(1) as pool, served.doing("bare", waits=1):
        answer = pool.submit(served.infer, "bare_capsule", given)
        consumer.wait_for("begun")
        time.sleep(0.1)
        held.open()
        assert answer.result() == (200, (8 * given).tolist())


def test_writes_to_an_input_precede_the_called_model(served, gate):
    given, held, called = values(), gate("editor"), gate("consumer")
    held.hold()
    with ThreadPoolExecutor(1) as pool, served.doing("editor", d2d=(4 * COUNT, 1)):
        answer = pool.submit(served.infer, "edited", given)
        called.wait_for("made")
        held.open()
        assert answer.result() == (200, (16 * given).tolist())


def test_an_event_is_not_recorded_again_while_somebody_waits_for_it(served, gate):
    given, held, consumer = values(), gate("maker"), gate("consumer")
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.infer, "members", given)
        consumer.wait_for("made")
        # More than there are events, on a stream that is soon done.
        for _ in range(EVENTS + 6):
            other = values(4)
            assert served.infer("others", other, id="quick") == (200, (8 * other).tolist())
        held.open()
        assert answer.result() == (200, (8 * given).tolist())


def test_all_events_in_use_cost_a_wait_and_nothing_else(served, gate):
    held = gate("other_maker")
    held.hold()
    name = (
        'gpubridge_fallbacks_total{model="other_maker",reason="device_events_in_use",version="1"}'
    )
    many = [values(4) for _ in range(EVENTS + 2)]
    with ThreadPoolExecutor(len(many)) as pool:
        answers = [pool.submit(served.infer, "too_many", each) for each in many]
        wait_until(lambda: served.server.metrics().get(name), "a wait", served.server)
        held.open()
        for each, answer in zip(many, answers, strict=True):
            assert answer.result() == (200, (8 * each).tolist())


def test_a_slot_is_not_used_again_while_a_stream_still_reads_it(tmp_path):
    write_device_model(tmp_path, "maker", MAKER + PATIENT)
    write_device_model(tmp_path, "consumer", CONSUMER)
    write_device_model(tmp_path, "last", DOUBLE)
    ensemble(tmp_path, "members", ["maker", "consumer", "last"])
    with running_device_server(tmp_path, arena=SMALL_ARENA, delay_us=0) as served:
        maker, consumer = (Gate(tmp_path, model, served.server) for model in ("maker", "consumer"))
        first, second = values(LARGE), values(LARGE)
        consumer.hold()
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(served.infer, "members", first)
            consumer.wait_for("made")
            other = pool.submit(served.infer, "members", second)
            maker.wait_for("begun", 2)
            # It has to wait for the slot, however long; this is time enough to take it.
            time.sleep(0.3)
            taken = maker.times("made") > 1
            consumer.open()
            assert one.result() == (200, (8 * first).tolist())
            assert other.result() == (200, (8 * second).tolist()), served.server.log()
            assert not taken


@pytest.mark.parametrize("call", ["cuIpcGetEventHandle", "cuIpcOpenEventHandle"])
def test_the_producer_waits_if_events_cannot_be_shared(tmp_path, call):
    write_device_model(tmp_path, "maker", MAKER)
    write_device_model(tmp_path, "consumer", CONSUMER)
    write_device_model(tmp_path, "call_with", calling(MAKER, "consumer"))
    write_device_model(tmp_path, "last", DOUBLE)
    ensemble(tmp_path, "members", ["maker", "consumer", "last"])
    faults = [(call, NOT_SUPPORTED)]
    with running_device_server(tmp_path, faults=faults) as served:
        given = values()
        with served.doing("maker", waits=1), served.doing("consumer", waits=1):
            assert served.infer("members", given) == (200, (8 * given).tolist())
        with served.doing("call_with", d2h=(4 * COUNT, 1), waits=2):
            assert served.infer("call_with", given) == (200, (4 * given).tolist())
        reason = "device_events_not_shared"
        name = f'gpubridge_fallbacks_total{{model="maker",reason="{reason}",version="1"}}'
        assert served.server.metrics()[name] == 1
        assert f"{call} failed: CUDA_ERROR_NOT_SUPPORTED" in served.server.log()
