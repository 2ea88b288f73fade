"""Regions that clients shrink while models use them: who fails of it, and who does not."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import gevent
import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory as shm

from tests.process.client_memory import (
    SHM,
    infer,
    memory,
    model,
    regions,
    shared_input,
    shared_output,
)
from tests.process.controlled import only
from tests.process.gates import Gate, waiting_at
from tests.process.server import LITTLE_OUTPUT, PURE, running_server, wait_until, write_model

# With LITTLE_OUTPUT, one output of so many values fits.
COUNT = 1 << 18
BODY = """
way = int(x[1])
if x[0]:
    with open("{started}", "a") as file:
        file.write("x")
    {wait}
if way == PASSED_ON:
    return pb_utils.Tensor("OUT", x)
if way == WRITTEN:
    out = request.output("OUT", (4,), x.dtype)
    out.as_numpy()[:] = 1
    return out
if way == RAISED:
    raise ValueError(f"a sum of {{x.sum()}}")
if way == FORKED:
    child = os.fork()
    if not child:
        x.sum()
        os._exit(0)
    return pb_utils.Tensor("OUT", np.float32([os.waitpid(child, 0)[1]]))
return pb_utils.Tensor("OUT", np.sort(x)[:4].copy())
"""
SORTED, PASSED_ON, WRITTEN, RAISED, FORKED = range(5)
NAMES = "SORTED, PASSED_ON, WRITTEN, RAISED, FORKED = range(5)\n"
ANSWERS = "return [pb_utils.InferenceResponse([self.answer(r, r.inputs()[0].as_numpy())])"
SENDS = """[r.get_response_sender().send(
                    pb_utils.InferenceResponse([self.answer(r, r.inputs()[0].as_numpy())]), 1)"""
SHRUNK = "the client's shared memory region cannot be mapped: it has been shrunk"


DIES = """
import mmap, os, signal
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = request.inputs()[0].as_numpy()
            if x[0] == 1:
                os.kill(os.getpid(), signal.SIGBUS)
            if x[0] == 2:
                with open(__file__ + ".mapped", "w+b") as file:
                    file.truncate(1 << 16)
                    memory = mmap.mmap(file.fileno(), 1 << 16)
                    file.truncate(0)
                    memory[5]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)]) for _ in requests]
"""
FOUR = "instance_group [{ count: 4 }]"


@contextmanager
def serving(folder, environment, *models):
    """A server with models that look at their client's memory at two times, and a region."""
    started, at = folder / "started", folder / "gate"
    source = NAMES + model(BODY.format(started=started, wait=waiting_at(at)))
    write_model(folder / "models", "touch", source)
    write_model(folder / "models", "four", source, config=FOUR)
    write_model(folder / "models", "send", source.replace(ANSWERS, SENDS))
    write_model(folder / "models", "dies", DIES)
    flags = (LITTLE_OUTPUT, *only(*models))
    with (
        running_server(folder / "models", *flags, environment=environment) as server,
        memory(4 * COUNT) as (key, _),
        tritonclient.http.InferenceServerClient(server.http_url, concurrency=8) as client,
    ):
        file = SHM / key[1:]

        def register():
            client.register_system_shared_memory("r", key, 4 * COUNT)

        def shrink_while_used(requests, way=SORTED, *, name="touch", left=0, wanted=None):
            """Shrink the region while so many requests are executed, or waited for; returns their errors."""
            started.unlink(missing_ok=True)
            gate = Gate(at)
            values = np.ones(COUNT, np.float32)
            values[1] = way
            file.write_bytes(values.tobytes())
            register()
            given = [shared_input(tritonclient.http, "r", [COUNT])]
            asked = [client.async_infer(name, given, outputs=wanted) for _ in range(requests)]
            executed = min(requests, 4 if name == "four" else 1)

            def begun():
                gevent.sleep(0)  # The client's coroutines send what is not sent yet.
                # One that came after the region has been shrunk would be refused.
                if server.open_requests(name) < requests or not started.exists():
                    return False
                return started.stat().st_size == executed

            wait_until(begun, "the model to look", server)
            os.truncate(file, left)
            gate.open()
            errors = []
            for each in asked:
                try:
                    errors.append(each.get_result().as_numpy("OUT").tolist())
                except InferenceServerException as error:
                    errors.append(str(error))
            # What its client does next changes nothing.
            os.truncate(file, 4 * COUNT)
            return errors

        yield SimpleNamespace(
            server=server,
            client=client,
            key=key,
            file=file,
            register=register,
            shrink_while_used=shrink_while_used,
        )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    with serving(folder, {}, "touch", "four", "send", "dies") as used:
        yield used


@pytest.fixture
def used(compiled):
    """That server; no process of its models dies in the test, and no region is left."""
    stubs = compiled.server.stubs()
    yield compiled
    compiled.client.unregister_system_shared_memory()
    assert compiled.server.stubs() == stubs


@pytest.fixture(scope="module")
def pure(tmp_path_factory):
    """A server without the compiled module."""
    with serving(tmp_path_factory.mktemp("pure"), PURE, "touch") as used:
        yield used


def restarts(server):
    return server.metrics()['gpubridge_stub_restarts_total{model="touch",version="1"}']


def check_revoked(used):
    """The region is forgotten, may be registered anew, and is used then."""
    with pytest.raises(InferenceServerException, match="'r' was revoked: the object"):
        infer(tritonclient.http, used.client, "touch", COUNT, "r", None)
    assert used.client.get_system_shared_memory_status() == []
    assert "shared memory region 'r' is revoked" in used.server.log()
    used.register()
    os.truncate(used.file, 0)
    os.truncate(used.file, 4 * COUNT)
    result = infer(tritonclient.http, used.client, "touch", COUNT, "r", None)
    assert result.as_numpy("OUT").tolist() == [0, 0, 0, 0]
    used.client.unregister_system_shared_memory("r")


@pytest.mark.parametrize("name", ["touch", "four"])
def test_no_process_dies_however_many_use_it(used, name):
    for left in (0, 1 << 14):
        # Where there is one, three wait behind that which is executed.
        errors = used.shrink_while_used(4, name=name, left=left)
        assert all(SHRUNK in str(error) or "was revoked" in str(error) for error in errors)
        assert sum(SHRUNK in str(error) for error in errors) >= (4 if name == "four" else 1)
        check_revoked(used)
    assert restarts(used.server) == 0


def test_a_request_in_shrunk_memory_fails_with_every_model(used):
    wanted = tritonclient.http.InferRequestedOutput("OUT")
    ways = [(SORTED, wanted), (PASSED_ON, wanted), (RAISED, wanted)]
    ways += [(way, shared_output(tritonclient.http, "r", 16)) for way in (SORTED, WRITTEN)]
    # Again and again, with output memory for one.
    for way, output in ways * 3:
        (error,) = used.shrink_while_used(1, way, wanted=[output])
        assert SHRUNK in error
        check_revoked(used)
    # Neither errors of the model nor of ours hold its inputs.
    assert "keeps inputs beyond their request" not in used.server.log()


def test_a_response_that_its_model_sends(used):
    for way in (SORTED, PASSED_ON):
        (error,) = used.shrink_while_used(1, way, name="send")
        assert SHRUNK in error
    check_revoked(used)


def test_a_forked_child_ends_as_ever(used):
    assert used.shrink_while_used(1, FORKED) == [[7.0]]


@pytest.mark.parametrize("way", [1, 2])
def test_faults_outside_of_clients_memory_end_the_process(compiled, way):
    with regions(compiled.client, 400) as (source,):
        infer(tritonclient.http, compiled.client, "dies", 4, "0", None)
        shm.set_shared_memory_region(source, [np.full(100, way, np.float32)])
        with pytest.raises(InferenceServerException, match="SIGBUS"):
            infer(tritonclient.http, compiled.client, "dies", 4, "0", None)
        compiled.client.unregister_system_shared_memory()
    wait_until(lambda: compiled.server.is_ready("dies"), "the model to be back", compiled.server)


def test_a_region_that_is_shrunk_kills_one_process_and_is_revoked(pure):
    before = restarts(pure.server)
    pure.register()
    os.truncate(pure.file, 1 << 10)
    with pytest.raises(InferenceServerException, match="was shrunk"):
        infer(tritonclient.http, pure.client, "touch", COUNT, "r", None)
    os.truncate(pure.file, 4 * COUNT)
    infer(tritonclient.http, pure.client, "touch", COUNT, "r", None)
    pure.client.unregister_system_shared_memory("r")
    # Three wait behind the one that is executed.
    errors = pure.shrink_while_used(4)
    assert sum("SIGBUS): a client shrank" in error for error in errors) == 1, errors
    check_revoked(pure)
    assert restarts(pure.server) == before + 1


def test_deaths_by_regions_that_are_shrunk_do_not_count(pure):
    for _ in range(4):
        (error,) = pure.shrink_while_used(1)
        assert "SIGBUS" in error
        wait_until(lambda: pure.server.is_ready("touch"), "the stub to be back", pure.server)
    assert "restarts in" not in pure.server.log()
