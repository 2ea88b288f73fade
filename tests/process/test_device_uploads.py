"""Inputs that go to the GPU while the batch before theirs runs, and what may happen to them until then."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.process.device_models import (
    LIBRARY,
    SMALL_ARENA,
    running_device_server,
    write_device_model,
)
from tests.process.raw_http import connected
from tests.process.raw_http2 import PING, frames, open_stream, send_data
from tests.process.server import wait_until
from tests.process.test_device_network import pids_of, placement
from tests.waits import polling

COUNT = 10_000
NBYTES = 4 * COUNT
# Calls of which no request makes any, by their beginnings; what is slow, or waits without being counted.
FORBIDDEN = (
    "cuIpc",
    "cuMemAlloc",
    "cuMemFree",
    "cuDevicePrimary",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
)
INVALID_VALUE = 1
ILLEGAL_ADDRESS, UNKNOWN = 700, 999

# Doubles its input on the GPU, when it may: each execute takes one permit, if permits are asked for.
PATIENT = (
    LIBRARY
    + """
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def size(name):
    path = os.path.join(HERE, name)
    return os.path.getsize(path) if os.path.exists(path) else 0


class TritonPythonModel:
    def initialize(self, args):
        self.library = Library(args)

    def execute(self, requests):
        with open(os.path.join(HERE, "begun"), "a") as file:
            file.write("x")
        number = size("begun")
        UNTIL_PERMITTED
        return [self.answer(request) for request in requests]

    def answer(self, request):
        library = self.library
        (given,) = request.inputs()
        out = library.array("out", given.shape())
        library.double(
            library.pointer(given), out.__cuda_array_interface__["data"][0],
            int(np.prod(given.shape())))
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", out)])
"""
).replace(
    "UNTIL_PERMITTED",
    polling("size('permits') >= number or not os.path.exists(os.path.join(HERE, 'hold'))"),
)


class Permits:
    """Says which executes may go on."""

    def __init__(self, model, served):
        self._folder = served.server.repositories[0] / model
        self._served = served
        self._model = model
        for name in ("begun", "permits"):
            (self._folder / name).write_text("")
        (self._folder / "hold").touch()

    def give(self):
        with (self._folder / "permits").open("a") as file:
            file.write("x")

    def give_all(self):
        (self._folder / "hold").unlink(missing_ok=True)

    def wait_for(self, begun):
        wait_until(
            lambda: (self._folder / "begun").stat().st_size >= begun,
            f"{begun} executes to have begun",
            self._served.server,
        )

    def wait_for_requests(self, pending):
        """All have been sent to the stub when they count: as many as it may have at once."""
        server = self._served.server
        there = f"{pending} requests"
        wait_until(lambda: server.open_requests(self._model) == pending, there, server)
        # The last of them was counted in a turn of the server's loop that sends it at its end.
        server.metrics()


PLAIN, ONE, TWO = "patient", "singly", "paired"
SHAPES = {PLAIN: COUNT, ONE: (1, COUNT), TWO: (1, COUNT)}


@pytest.fixture(scope="module")
def served(repository):
    write_device_model(repository, PLAIN, PATIENT, config=placement("device"))
    for size, name in ((1, ONE), (2, TWO)):
        config = f"{placement('device')} max_batch_size: {size} dynamic_batching {{ }}"
        write_device_model(repository, name, PATIENT, config=config)
    with running_device_server(repository) as served:
        yield served


@pytest.fixture
def narrow(tmp_path):
    write_device_model(tmp_path, PLAIN, PATIENT, config=placement("device"))
    with running_device_server(tmp_path, arena=SMALL_ARENA) as served:
        yield served


@contextmanager
def lined_up(served, model=PLAIN, shape=None, count=3):
    """So many requests at the stub: the first is being executed; gives permits and what is asked."""
    # From the first answer on, the server feeds ahead.
    shape = shape or SHAPES[model]
    given = [np.random.default_rng().random(shape, np.float32) for _ in range(count)]
    assert served.infer(model, given[0])[0] == 200
    permits = Permits(model, served)
    with ThreadPoolExecutor(len(given)) as pool:
        answers = []
        try:
            for number, values in enumerate(given, 1):
                answers.append(pool.submit(served.infer, model, values))
                permits.wait_for_requests(number)
                if number == 1:
                    permits.wait_for(1)
            yield permits, answers, given
        finally:
            permits.give_all()


def uploads(served, pid, nbytes=NBYTES):
    """Copies of inputs: what the model's kernel brings to the GPU comes from its own memory."""
    calls = served.machine.calls("cuMemcpyHtoDAsync", pid)
    return [call for call in calls if call.arguments[0] == nbytes]


def doubled(values):
    return 200, (2 * values).ravel().tolist()


@pytest.mark.parametrize("model", [PLAIN, ONE])
def test_inputs_go_to_the_gpu_while_the_batch_before_theirs_runs(served, model):
    with lined_up(served, model) as (permits, answers, given):
        (pid,) = pids_of(served, model)
        before = len(uploads(served, pid))
        permits.give()
        permits.wait_for(2)
        # The kernel of the first, and the input of the third; that of the second came before, while
        # there was nothing to overlap with, or now.
        wait_until(
            lambda: len(uploads(served, pid)) == before + 3,
            "the third's input to be on its way while the second is executed",
            served.server,
        )
        assert not answers[1].done()
        permits.give_all()
        for answer, values in zip(answers, given, strict=True):
            assert answer.result() == doubled(values)


def test_many_at_once_are_right_and_cost_what_one_does(served):
    served.machine.delay(3000)
    given = [np.random.default_rng(i).random(COUNT, np.float32) for i in range(48)]
    for values in given[:8]:
        assert served.infer(PLAIN, values) == doubled(values)
    (pid,) = pids_of(served, PLAIN)
    before = len(served.machine.calls(pid=pid))
    cost = {"h2d": (48 * NBYTES, 48), "d2h": (48 * NBYTES, 48), "waits": 48}
    with ThreadPoolExecutor(6) as pool, served.doing(PLAIN, **cost):
        answers = list(pool.map(lambda values: served.infer(PLAIN, values), given))
    served.machine.delay(200)
    for answer, values in zip(answers, given, strict=True):
        assert answer == doubled(values)
    calls = [call.name for call in served.machine.calls(pid=pid)][before:]
    assert not [name for name in calls if name.startswith(FORBIDDEN)]
    # Other waits than those that are counted are none.
    assert calls.count("cuEventSynchronize") <= 48


RST_STREAM = 3
CANCEL = 8


def send_frame(sock, kind, flags, stream, payload=b""):
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    sock.sendall(head + payload)


@contextmanager
def asked_by_hand(served, values):
    """Ask over gRPC; gives what cancels that, and returns when the server has seen it."""
    message = service_pb2.ModelInferRequest(model_name="patient")
    tensor = message.inputs.add(name="IN", datatype="FP32", shape=[values.size])
    assert tensor.name == "IN"
    message.raw_input_contents.append(values.tobytes())
    body = message.SerializeToString()
    body = b"\0" + len(body).to_bytes(4, "big") + body

    def cancel():
        send_frame(sock, RST_STREAM, 0, 1, CANCEL.to_bytes(4, "big"))
        send_frame(sock, PING, 0, 0, bytes(8))
        assert any(kind == PING for kind, _ in frames(sock))

    with connected(served.server.grpc_url) as sock:
        open_stream(sock, b"ModelInfer")
        for at in range(0, len(body), 16_000):
            send_data(sock, body[at : at + 16_000])
        send_frame(sock, 0, 1, 1)
        yield cancel


def test_a_request_that_is_cancelled_after_its_upload_has_begun_is_not_executed(narrow):
    with (
        lined_up(narrow, count=2) as (permits, answers, given),
        asked_by_hand(narrow, given[0]) as cancel,
    ):
        (pid,) = pids_of(narrow, PLAIN)
        permits.wait_for_requests(3)
        before = len(uploads(narrow, pid))
        permits.give()
        permits.wait_for(2)
        wait_until(lambda: len(uploads(narrow, pid)) == before + 3, "its upload", narrow.server)
        cancel()
        permits.give()
        for answer, each in zip(answers, given, strict=True):
            assert answer.result() == doubled(each)
        permits.wait_for_requests(0)
    assert (narrow.server.repositories[0] / PLAIN / "begun").stat().st_size == 2
    # Nothing of it is left in the arena.
    whole = np.ones(SMALL_ARENA // 4, np.float32)
    assert narrow.infer(PLAIN, whole) == doubled(whole)


def test_a_stub_that_dies_with_uploads_under_way_loses_what_it_had_begun_and_no_more(served):
    with lined_up(served) as (permits, answers, given):
        (pid,) = pids_of(served, PLAIN)
        before = len(uploads(served, pid))
        permits.give()
        permits.wait_for(2)
        wait_until(lambda: len(uploads(served, pid)) == before + 3, "the upload", served.server)
        os.kill(pid, signal.SIGKILL)
        assert answers[0].result() == doubled(given[0])
        status, error = answers[1].result()
        assert status == 503
        assert "is not healthy" in error
        permits.give_all()
        assert answers[2].result() == doubled(given[2])
    values = np.ones(COUNT, np.float32)
    assert served.infer(PLAIN, values) == doubled(values)


@pytest.mark.parametrize(
    ("model", "nth"),
    [(PLAIN, 2), (PLAIN, 3), (TWO, 2), (TWO, 3)],
    ids=["at its turn", "ahead", "first of a batch", "last of a batch"],
)
def test_an_upload_that_fails_fails_the_request_that_it_is_for(served, model, nth):
    with lined_up(served, model) as (permits, answers, given):
        (pid,) = pids_of(served, model)
        # The first is the kernel's of the request that is executed.
        served.machine.fail("cuMemcpyHtoDAsync", INVALID_VALUE, nth=nth)
        permits.give()
        permits.wait_for(2)
        # Else each second, or third, would fail.
        served.machine.heal()
        permits.give_all()
        for number, (answer, values) in enumerate(zip(answers, given, strict=True), 1):
            if number == nth:
                status, error = answer.result()
                assert status == 500
                assert "cuMemcpyHtoDAsync failed" in error
            else:
                assert answer.result() == doubled(values)
        assert pids_of(served, model) == [pid]


@pytest.mark.parametrize(("code", "statuses"), [(ILLEGAL_ADDRESS, [500]), (UNKNOWN, [500, 503])])
def test_a_device_that_is_lost_with_the_next_upload_costs_what_was_begun(served, code, statuses):
    """An unknown error stays with the context: the stub may know of it before the request fails."""
    served.machine.set(unknown="sticks")
    with lined_up(served) as (permits, answers, given):
        (pid,) = pids_of(served, PLAIN)
        permits.give()
        permits.wait_for(2)
        # Late enough that the answer waits for it.
        served.machine.delay(5000)
        served.machine.fail("cuEventSynchronize", code)
        permits.give()
        assert answers[1].result()[0] in statuses
        served.machine.heal()
        served.machine.delay(200)
        permits.give_all()
        assert answers[2].result() == doubled(given[2])
        assert pids_of(served, PLAIN) != [pid]
