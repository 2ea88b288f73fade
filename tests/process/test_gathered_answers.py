"""Answers that a process has, and has not sent yet when a request kills it, reach their clients."""

import json

import pytest

from tests.process.gates import Gate
from tests.process.raw_http import connected, inference, read_answers
from tests.process.server import PURE, running_server, write_code_model

WAYS = {
    "exit": "os._exit(1)",
    "kill": "os.kill(os.getpid(), 9)",
    "fault": "import ctypes; ctypes.string_at(0)",
}
QUICK = 5
ROUNDS = 2
NOTE = "open({notes!r}, 'a').write('{name} '); self.said = '{name}'"


def pipelined(server, codes, sent):
    """Send requests in one go, then call ``sent``; returns their statuses and what the model said."""
    with connected(server.http_url) as client:
        for code in codes:
            tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}
            client.sendall(inference("m", json.dumps({"inputs": [tensor]}).encode()))
        sent()
        for status, body in read_answers(client, len(codes)):
            answer = json.loads(body)
            yield status, answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


@pytest.mark.parametrize(
    ("way", "environment"), [*((way, {}) for way in WAYS), ("kill", PURE)], ids=[*WAYS, "python"]
)
def test_responses_before_a_death_reach_their_clients(tmp_path, way, environment):
    notes = tmp_path / "notes"
    write_code_model(tmp_path / "models")
    with running_server(tmp_path / "models", environment=environment) as server:
        for _ in range(ROUNDS):
            notes.unlink(missing_ok=True)
            gate = Gate(tmp_path / "gate")
            # From now on its process gets several at once.
            for _ in range(20):
                assert server.ask("self.said = 'well'") == (200, "well")
            names = [f"quick{number}" for number in range(QUICK)]
            after = [f"after{number}" for number in range(QUICK)]
            codes = [f"{gate.wait}; self.said = 'waited'"]
            codes += [NOTE.format(notes=str(notes), name=name) for name in names]
            codes += [WAYS[way]]
            codes += [NOTE.format(notes=str(notes), name=name) for name in after]
            answers = list(pipelined(server, codes, gate.open))
            died = answers.pop(QUICK + 1)
            assert (died[0], "is not healthy" in died[1]) == (503, True)
            assert answers == [(200, said) for said in ("waited", *names, *after)]
            # None was executed twice.
            assert notes.read_text().split() == [*names, *after]
        count = ROUNDS * (20 + 2 * QUICK + 1)
        labels = 'model="m",version="1"'
        metrics = server.metrics()
        assert metrics[f"nv_inference_request_success{{{labels}}}"] == count
        if environment:
            # Each process takes the slower way, a spare one too, and one line says so.
            slower = 'gpubridge_fallbacks_total{model="m",reason="native_module",version="1"}'
            assert metrics[slower] >= 1 + ROUNDS
            assert server.log().count("runs slower: turned off by GPUBRIDGE_NO_NATIVE=1") == 1
