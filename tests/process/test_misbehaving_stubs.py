"""Models that fork, print and leave threads, and models that lie to the server over its own channel."""

import json
import re

import pytest

from tests.process.gates import Gate
from tests.process.raw_http import connected
from tests.process.server import alive, running_server, wait_until, write_code_model, write_model
from tests.unit.model_configs import cases

CHANNEL = """
from gpubridge.transport import messages as wire
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import encode_tensors

encode = record_encoder()

def record(ticket, described, refs):
    return encode(ticket, *described, refs)

def channel():
    # Not that of its calls, which is of the same kind.
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "_settings"):
        frame = frame.f_back
    return frame.f_locals["self"]._channel.socket

def results(*records, sequence=1, started=1, ended=2):
    batch = wire.encode_result_batch(sequence, (started, started, ended), 0, records)
    return wire.encode_frame(wire.Kind.RESULTS, [batch])

def announce(fd):
    # Under a number of this stub's own, so that only the memory is wrong, or the place in it.
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "_outputs"):
        frame = frame.f_back
    region = frame.f_locals["self"]._outputs._arena._owner << 32 | 99
    message = wire.control_message(wire.Kind.REGION, region=region, size=4096)
    socket.send_fds(channel(), [message], [fd])
    return region

TEXT = encode_tensors([("OUT", "BYTES", [1])])
FLOATS = encode_tensors([("OUT", "FP32", [4])])
NONE = encode_tensors([])
"""
LIES = cases(
    r"""
b'\xff' * 100
    unknown kind 255
wire.control_message(wire.Kind.TRIM)
    unknown kind 5
bytes(200_000)
    a message of more than 131072 bytes
bytes(16)
    a notice of a long message came without its descriptor
bytes([wire.Kind.NOTICE]) + b'{'
    no JSON
bytes([wire.Kind.NOTICE]) + b'[' * 100_000
    no JSON
wire.control_message(wire.Kind.SPAN, trace=1, parent=0, id=1, start=1, end=2, name=5, error='',
attributes={})
    expected a string
wire.control_message(wire.Kind.SPAN, trace=1, parent=0, id=1, start=1 << 63, end=2, name='', error='',
attributes={})
    too large numbers
wire.control_message(wire.Kind.SPAN, trace=1, parent=0, id=1, start=1, end=2, name='', error='',
attributes={'a': [1]})
    expected a string
bytes([wire.Kind.NOTICE]) + b'[]'
    expected a JSON object
wire.control_message(wire.Kind.NOTICE, level=1, text='', file='', line=1, fallback=[])
    field 'fallback': expected one of native_module,
wire.control_message(wire.Kind.NOTICE, level=[], text='', file='', line=1)
    field 'level': expected a number, got []
wire.control_message(wire.Kind.NOTICE, level=1, text={}, file='', line=1)
    field 'text': expected a string, got {}
wire.control_message(wire.Kind.COMPLETED, config=[1])
    field 'config': expected a string or null, got [1]
wire.control_message(wire.Kind.REGION, region=1 << 32, size=4096)
    region 0x100000000 is not the stub's to announce
wire.control_message(wire.Kind.DROP_REGION, region=-1)
    field 'region': expected a number, got -1
wire.control_message(wire.Kind.DROP_REGION, region=1)
    region 0x1 is not the stub's to drop
results(b'')[:20]
    RESULTS message: it ends in the middle of a batch
results(record(0, NONE, ()), sequence=77)
    results of batch 77, which is not at the stub
results(record(9, NONE, ()))
    a result for ticket 9, which is not running
results(record(0, NONE, ()), record(1, NONE, ()))
    results of batch 2, which is not at the stub
results(record(0, TEXT, (7 << 32, 0, 8, 0)))
    8 bytes at 0 of region 0x700000000 under lease 0 do not exist
results(record(0, TEXT, (7 << 32, 0, 8, 0xffffffff)))
    under lease 4294967295 do not exist
results(record(0, FLOATS, (7 << 32, 0, 8, 0)))
    output 'OUT' of 8 bytes, its shape needs 16
results(record(0, (FLOATS[0].replace(b'FP32', b'FP99'), FLOATS[1]), (0, 0, 4, 0)))
    sent a malformed message (signature
results(record(0, encode_tensors([('OUT', 'FP32', [-1])]), (0, 0, 4, 0)))
    a tensor has a negative dim, or more bytes than 63 bits count
results(record(0, encode_tensors([('OUT', 'FP32', [1 << 62, 4])]), (0, 0, 4, 0)))
    a tensor has a negative dim, or more bytes than 63 bits count
results(record(0, (FLOATS[0], b''), (0, 0, 4, 0)))
    a record of 0 dims came with a signature of 1
b''
    closed its channel and was killed
"""
)
"""Data that a model sends over its stub's channel in its second ``execute``, and the error it causes.

The second request of a stub is batch 2 and has ticket 0.
"""


@pytest.fixture(scope="module")
def server(repository):
    for name in ("liar", "clock", "bystander", "parallel", "talker", "placer", "memory", "long"):
        write_code_model(repository, name)
    write_model(repository, "forks", _FORKS, tensors="IN UINT8 [-1] > OUT UINT8 [-1]")
    with running_server(repository) as running:
        yield running


def said(server, code, model):
    status, text = server.ask(code, model)
    assert status == 200, text
    return text


@pytest.mark.parametrize(("message", "what"), LIES)
def test_a_lie_ends_its_stub_and_no_other(server, message, what):
    bystander = said(server, "self.said = os.getpid()", "bystander")
    wait_until(lambda: server.is_ready("liar"), "the stub to run again", server)
    assert said(server, "self.said = 'honest'", "liar") == "honest"
    code = f"""{CHANNEL}
import functools
results = functools.partial(results, sequence=2)
channel().send({message})
threading.Event().wait()
"""
    status, error = server.ask(code, "liar")
    assert status == 503
    assert error.startswith("Stub process 'liar_0' is not healthy. It ")
    assert what in error
    assert error.endswith("and was killed.")
    assert error in server.log()
    assert said(server, "self.said = os.getpid()", "bystander") == bystander


@pytest.mark.parametrize(
    ("started", "ended"), [(0, 0), (2, 1), (0, (1 << 64) - 1), ((1 << 64) - 1, 0)]
)
def test_times_that_are_made_up_spoil_no_figure(server, started, ended):
    wait_until(lambda: server.is_ready("clock"), "the stub to run again", server)
    before = _durations(server, "clock")
    code = f"""{CHANNEL}
channel().send(results(record(0, NONE, ()), started={started}, ended={ended}))
os._exit(0)
"""
    # Its answer counts: it has only lied about when it was made.
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}
    status, _, body = server.request(
        "POST", "/v2/models/clock/infer", json.dumps({"inputs": [tensor]})
    )
    assert (status, json.loads(body).get("outputs")) == (200, []), body
    for figure, before_ns in zip(_durations(server, "clock"), before, strict=True):
        assert 0 <= figure - before_ns < 600e9, figure
    durations = {key: us for key, us in server.metrics().items() if "_duration_us{" in key}
    assert durations
    assert all(0 <= us < 600e6 for us in durations.values()), durations


@pytest.mark.parametrize("fill", [0, 1, 0x41, 0xFF])
def test_a_page_that_its_model_has_overwritten_costs_it_one_request_at_most(server, fill):
    wait_until(lambda: server.is_ready("clock"), "the stub to run again", server)
    # All shared memory but that of tensors.
    code = f"""
import ctypes
for line in open("/proc/self/maps"):
    place, rights, *_ = line.split()
    first, end = (int(each, 16) for each in place.split("-"))
    if rights[1] == "w" and rights[3] == "s" and end - first < 1 << 24:
        self.said = ctypes.memset(first, {fill}, end - first)
"""
    assert server.ask(code, "clock")[0] == 200
    answers = [server.ask("self.said = 'next'", "clock") for _ in range(3)]
    assert answers[1:] == [(200, "next")] * 2
    assert answers[0] == answers[1] or "which is not cancelled) and was killed" in answers[0][1]


def _durations(server, name):
    """Return the nanoseconds of each figure of a model's statistics."""
    return [each["ns"] for each in server.statistics(name)["inference_stats"].values()]


@pytest.mark.parametrize("offset", [1 << 20, (1 << 64) - 8])
def test_a_place_outside_of_a_region_is_a_lie(server, offset):
    code = f"""{CHANNEL}
import fcntl
fd = os.memfd_create("own", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 4096)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
channel().send(results(record(0, TEXT, (announce(fd), {offset}, 8, 0))))
threading.Event().wait()
"""
    status, error = server.ask(code, "placer")
    assert status == 503
    assert re.search(rf"\(8 bytes at {offset} of region 0x\w+00000063 under lease 0 do not", error)
    wait_until(lambda: server.is_ready("placer"), "the stub to run again", server)


@pytest.mark.parametrize(
    ("memory", "what"),
    [
        ("os.memfd_create('x', os.MFD_ALLOW_SEALING)", "sealed against shrinking"),
        ("os.open('/dev/null', os.O_RDWR)", "cannot map 4096 bytes"),
    ],
)
def test_only_sealed_memory_is_taken_from_a_stub(server, memory, what):
    code = f"{CHANNEL}\nannounce({memory})\nthreading.Event().wait()"
    status, error = server.ask(code, "memory")
    assert status == 503
    assert what in error
    wait_until(lambda: server.is_ready("memory"), "the stub to run again", server)


@pytest.mark.parametrize(
    ("memory", "what"),
    cases("""
bytes(5), 1 << 21
    a long message of 2097152 bytes was announced, its memory holds 5
bytes(1 << 21), 1 << 40
    a long message of 1099511627776 bytes was announced
bytes([19]) + b'{' * (1 << 21), (1 << 21) + 1
    no JSON
long_error('x' * (1 << 21), b'x' * 9, b'\\xff' * 9), None
    an error message that is not UTF-8
long_error('x' * (1 << 21))[:-1], None
    RESULTS message: it ends in the middle
results(encode(0, *NONE, (), 1, context=ResponseContext(set_aside=0).encoded())), None
    a response refers to missing long texts
"""),
)
def test_a_lie_in_a_long_message_ends_its_stub(server, memory, what):
    code = f"""{CHANNEL}
from gpubridge.transport.channel import Channel
from gpubridge.transport.context import ResponseContext
def long_error(text, *changed):
    context = ResponseContext(error=text).encoded().replace(*changed or (b"", b""), 1)
    return results(encode(0, *NONE, (), 1, context=context))
message, size = {memory}
if size is None:
    Channel(channel()).send(message)
else:
    fd = os.memfd_create("message")
    os.write(fd, message)
    socket.send_fds(channel(), [bytes(4) + size.to_bytes(8, "little")], [fd])
threading.Event().wait()
"""
    status, error = server.ask(code, "long")
    assert status == 503
    assert what in error
    wait_until(lambda: server.is_ready("long"), "the stub to run again", server)


_FORKS = """
import fcntl, os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = os.path.dirname(args["model_repository"])

    def execute(self, requests):
        letter = b"p"
        if requests[0].inputs()[0].as_numpy()[0] and not os.fork():
            letter = b"c"
            fcntl.flock(open(self.folder + "/gate"), fcntl.LOCK_SH)
            with open(self.folder + "/child", "w") as file:
                file.write(str(os.getpid()))
        data = np.frombuffer(letter * (8 << 20), np.uint8)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", data)]) for _ in requests]
"""


def test_a_forked_child_that_returns_from_execute_touches_no_answer_of_its_parent(server):
    def request(fork):
        tensor = {"name": "IN", "datatype": "UINT8", "shape": [1], "data": [fork]}
        fields = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        return json.dumps(fields).encode()

    folder = server.repositories[0]
    gate = Gate(folder / "gate")
    stubs = set(server.stubs())
    # From now on there is a piece of output memory that the child knows too.
    assert server.request("POST", "/v2/models/forks/infer", request(0))[0] == 200
    # A client that does not read leaves most of the answer in the memory it was placed in.
    with connected(server.http_url, 32768) as client:
        body = request(1)
        head = b"POST /v2/models/forks/infer HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        answer = client.recv(1000)
        gate.open()
        wait_until((folder / "child").exists, "the child to return", server)
        wait_until((folder / "child").read_text, "its number", server)
        child = int((folder / "child").read_text())
        wait_until(lambda: not alive(child), "the child to end", server)
        while part := client.recv(1 << 20):
            answer += part
    assert answer.endswith(b"p" * (8 << 20))
    # There may be a spare one since an earlier test.
    assert stubs <= set(server.stubs())


def test_a_model_may_use_processes_of_multiprocessing(server):
    code = """
import multiprocessing
queue = multiprocessing.get_context("fork").SimpleQueue()
worker = multiprocessing.get_context("fork").Process(
    target=lambda: queue.put(int(request.inputs()[0].as_numpy().size)))
worker.start()
self.said = f"{queue.get()} {worker.join()} {worker.exitcode} {os.getpid()}"
"""
    first, second = (said(server, code, "parallel") for _ in range(2))
    assert first == second
    assert first.startswith("1 None 0 ")


def test_a_child_that_outlives_execute_disturbs_neither_answers_nor_the_stop(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path) as server:
        code = "child = os.fork()\nif not child: threading.Event().wait()\nself.said = child"
        child = int(said(server, code, "m"))
        assert said(server, "self.said = 'next'", "m") == "next"
        assert alive(child)
        assert server.stop() == 0
        wait_until(lambda: not alive(child), "the child to end")


def test_a_models_prints_reach_the_servers_output_at_once(server):
    said(server, "print('out', 'of', 'it'); print('to err', file=sys.stderr)", "talker")
    wait_until(lambda: "out of it\n" in server.log(), "the line", server)
    assert "to err\n" in server.log()


def test_threads_go_on_between_requests(server):
    said(
        server,
        "self.ticks = 0\n"
        "def tick():\n"
        "    while True: self.ticks += 1; threading.Event().wait(0.001)\n"
        "threading.Thread(target=tick, daemon=True).start()",
        "talker",
    )
    before = int(said(server, "self.said = self.ticks", "talker"))
    wait_until(
        lambda: int(said(server, "self.said = self.ticks", "talker")) > before, "a tick", server
    )
