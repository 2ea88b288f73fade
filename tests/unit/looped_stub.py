"""A stub's process, and the side of its server."""

import os
import socket
import struct

import numpy as np
import pytest

from gpubridge.host_shm import Segment
from gpubridge.tensor import native
from gpubridge.transport.channel import Channel, pair
from gpubridge.transport.context import RequestContext, ResponseContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.messages import (
    Kind,
    ResponseFlag,
    control_message,
    decode_control,
    encode_frame,
)
from gpubridge.transport.records import record_encoder, record_reader
from gpubridge.transport.signatures import encode_tensors
from gpubridge.transport.stub_settings import (
    MemorySettings,
    StubModel,
    StubSettings,
    encode_initialize,
)
from tests.forks import fork
from tests.unit.server_messages import decode_responses, decode_results, encode_batch

NO_CONTEXT = RequestContext()
PROGRAM = """
# What was passed as standard input is the channel.
channel = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.argv = [""]
sys.exit(run(channel, os.getppid()))
"""
REGION = 77
CLAIMS = 1 << 63
"""In the cell of claims: the stub claims batches."""
REGION_BYTES = 8 << 20

MODEL = """
import os
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

kept = []
silent = {decoupled}

class TritonPythonModel:
    def execute(self, requests):
        answers = [self.answer(request) for request in requests]
        return None if silent else answers

    def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        data = tensor.as_numpy()
{body}
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", data)])
"""


def started_stubs(runtime, folder):
    """Yield a function that starts stubs with a runtime; they end with the test.

    It takes lines for `MODEL`, or a whole ``model``.
    """
    if runtime == "native" and native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    stubs = []

    def start(*body, **settings):
        stub = Stub(folder, runtime, body, **settings)
        stubs.append(stub)
        return stub

    yield start
    for stub in stubs:
        stub.close()


class Stub:
    """A stub's process and what its server shares with it."""

    def __init__(
        self,
        folder,
        runtime,
        body,
        *,
        outputs=("OUT",),
        output_limit=64 << 20,
        model="",
        stdout=1,
        **settings,
    ):
        (folder / "1").mkdir()
        path = folder / "1" / "model.py"
        path.write_text(
            model
            or MODEL.format(
                body="\n".join(f"        {line}" for line in body),
                decoupled=settings.get("decoupled", False),
            )
        )
        ours, theirs = pair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 30, 0))
        calls, their_calls = pair()
        self.calls = calls
        control = Segment.create(0, ControlPage.SIZE)
        self.page = ControlPage(control)
        self.process = fork(
            "from gpubridge.stub.process import run",
            PROGRAM,
            {**os.environ, native.DISABLE_VARIABLE: str(int(runtime == "python"))},
            (theirs.fileno(), stdout, 2),
        )
        theirs.close()
        self.channel = Channel(ours)
        served = StubModel("m", 1, "python", str(path), str(folder), outputs, **settings)
        arguments = {"model_config": "{}", "model_instance_device_id": "0"}
        given = StubSettings(served, "m_0_0", arguments, input_placement="host")
        self.channel.send(
            encode_initialize(given, MemorySettings(1, output_limit), "token"),
            [control.fd, their_calls.fileno()],
        )
        their_calls.close()
        self.segments = {}
        self.notices = []
        self._kept = []
        self._reader = record_reader(ResponseContext)
        while self._receive()[0] != Kind.READY:
            pass
        self.region = Segment.create(REGION, REGION_BYTES)
        self.channel.send(
            control_message(Kind.REGION, region=REGION, size=REGION_BYTES, client=False),
            [self.region.fd],
        )
        self._sequence = 0

    def _receive(self):
        message, fds = self.channel.receive()
        if message[0] == Kind.REGION:
            fields = decode_control(message)
            self.segments[fields["region"]] = Segment.open(
                fields["region"], fds.pop(), fields["size"]
            )
        elif message[0] == Kind.DROP_REGION:
            # What was read of it stays mapped.
            self._kept.append(self.segments.pop(decode_control(message)["region"]))
        elif message[0] == Kind.NOTICE:
            self.notices.append(decode_control(message)["text"])
        for fd in fds:
            os.close(fd)
        return message

    def record(
        self,
        ticket,
        array,
        *,
        requested=(),
        identifier=b"",
        datatype="FP32",
        at=None,
        context=NO_CONTEXT,
    ):
        """Put an input into memory that is lent, and make the record of its request."""
        at = ticket * 4096 if at is None else at
        data = array if isinstance(array, bytes) else array.tobytes()
        shape = (1,) if isinstance(array, bytes) else array.shape
        self.region.view[at : at + len(data)] = data
        self.page.lent[ticket] = 1
        signature, dims = encode_tensors([("IN", datatype, shape)], requested)
        refs = [REGION, at, len(data), ticket]
        return record_encoder()(
            ticket, signature, dims, refs, identifier=identifier, context=context.encoded()
        )

    def send(self, *batches):
        encoded = []
        for records in batches:
            self._sequence += 1
            encoded.append(encode_batch(self._sequence, records))
        self.channel.send(encode_frame(Kind.EXECUTE, encoded))

    def results(self, count):
        """Return so many results, in the order in which they came."""
        found = []
        while len(found) < count:
            message = self._receive()
            if message[0] == Kind.RESULTS:
                found += decode_results(message, self._reader)
        return found

    def responses(self, count):
        """Return so many responses that the model sent by itself."""
        found = []
        while len(found) < count:
            message = self._receive()
            if message[0] == Kind.RESPONSES:
                found += decode_responses(message, self._reader)[0]
        return found

    def answers(self, *tickets):
        """Return the last record of each of some requests, in whichever message it comes."""
        found = {}
        while not found.keys() >= set(tickets):
            message, records = self._receive(), []
            if message[0] == Kind.RESULTS:
                results = decode_results(message, self._reader)
                records = [record for result in results for record in result.records]
            elif message[0] == Kind.RESPONSES:
                records = decode_responses(message, self._reader)[0]
            found |= {each.ticket: each for each in records if not each.word & ResponseFlag.OPEN}
        return [found[ticket] for ticket in tickets]

    def execute(self, *records):
        """Execute one batch; returns its answers."""
        self.send(records)
        (result,) = self.results(1)
        return result.records

    def data(self, record, index=0):
        """Return the bytes of an output, and take note that it was read."""
        region, offset, nbytes, lease = record.refs[index]
        if not nbytes:
            return b""
        assert self.page.outputs[lease] == 1
        return bytes(self.segments[region].view[offset : offset + nbytes])

    def release(self, record):
        for ref in record.refs:
            self.page.outputs[ref[3]] = 0

    def array(self, record, dtype=np.float32):
        return np.frombuffer(self.data(record), dtype).reshape(record.shapes[0])

    def error(self, record):
        assert record.word & ResponseFlag.ERROR
        return record.context.error

    def close(self):
        self.channel.close()
        self.calls.close()
        code = self.process.wait(30)
        self.process.close()
        self.page.close()
        return code
