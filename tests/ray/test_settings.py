"""The arguments of a fleet's application, and what needs Ray."""

import subprocess
import sys

import pytest

from gpubridge.errors import BridgeError
from gpubridge.ray.autoscaling import BUSY, PENDING, TARGET, pending_policy, pending_target
from gpubridge.ray.local_fleet import places_text
from gpubridge.ray.settings import FleetSettings
from tests.commands import run_command

MODELS = {"model_repository": "/models"}


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({}, "needs the argument model_repository"),
        ({"model_repository": 3}, "expects a text or a list of texts, got 3"),
        ({**MODELS, "port": 8000}, "unknown argument 'port'"),
        ({**MODELS, "proxies": "some"}, "proxies expects one of all, head, none"),
        ({**MODELS, "threads": "2"}, "threads expects an integer of at least 1, got '2'"),
        ({**MODELS, "http_port": 8001}, "expected three ports below 65536"),
        ({**MODELS, "retry_bytes": 100}, "retry_bytes expects at least 16384"),
        ({**MODELS, "flags": ["--http-port=1"]}, "the fleet sets --http-port itself"),
        ({**MODELS, "flags": ["--load-model=m"]}, "the fleet sets --load-model itself"),
    ],
)
def test_a_wrong_argument_is_refused(args, complaint):
    with pytest.raises(BridgeError, match=complaint):
        FleetSettings.from_args(args)


def test_a_repository_may_be_one_or_several():
    assert FleetSettings.from_args(MODELS).model_repository == ("/models",)
    settings = FleetSettings.from_args({"model_repository": ["/a", "/b"], "flags": ["--id=x"]})
    assert settings.model_repository == ("/a", "/b")
    assert settings.flags == ("--id=x",)


def test_a_server_should_have_twice_what_its_busiest_model_executes_at_once():
    configs = {
        "batching": {"max_batch_size": 8, "instance_group": [{"count": 2}, {"count": 1}]},
        "plain": {"max_batch_size": 0},
    }
    assert pending_target(configs) == 48
    assert pending_target({"plain": {}}) == pending_target({}) == 2


class Context:
    """What the policy reads of Ray Serve's AutoscalingContext."""

    current_num_replicas = 3
    capacity_adjusted_min_replicas = 1
    capacity_adjusted_max_replicas = 8

    def __init__(self, metrics):
        self.aggregated_metrics = metrics


@pytest.mark.parametrize(
    ("pending", "busy", "wanted"),
    [
        ((0, 0), 0.1, 1),
        ((0, 0), 0.7, 2),
        ((0, 0, 0, 0), 0.9, 3),
        ((10, 22), 0.5, 2),
        ((16, 17), 1.0, 3),
        ((900, 900), 1.0, 8),
        ((), 0.0, 3),
    ],
)
def test_there_are_as_many_replicas_as_the_requests_need(pending, busy, wanted):
    replicas = range(len(pending))
    metrics = {
        PENDING: dict(enumerate(pending)),
        TARGET: dict.fromkeys(replicas, 16.0),
        BUSY: dict.fromkeys(replicas, busy),
    }
    assert pending_policy(Context(metrics))[0] == wanted
    assert pending_policy(Context(None))[0] == 3


def test_nothing_of_ray_is_imported_unless_it_is_used():
    code = (
        "import sys\n"
        "import gpubridge.ray, gpubridge.ray.proxy, gpubridge.ray.local_fleet\n"
        "from gpubridge import cli\n"
        "cli.command_parser('ray')\n"
        "assert not {'ray', 'grpc'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_ray_the_error_is_its_installation(tmp_path):
    code = (
        "import sys\nsys.modules['ray'] = None\nfrom gpubridge import cli\n"
        f"sys.exit(cli.main(['ray', 'up', {str(tmp_path)!r}]))"
    )
    run = run_command([sys.executable, "-c", code])
    assert run.returncode == 1
    assert "pip install 'gpubridge[ray]'" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["up"], "needs the argument model_repository"),
        (["up", "models", "--replicas", "0"], "--replicas expects at least 1, got 0"),
        (["up", "models", "--server-flag=--grpc-port=1"], "the fleet sets --grpc-port itself"),
        (["load"], "expects the name of a model"),
        (["status", "x"], "expects no names"),
    ],
)
def test_a_wrong_command_is_refused(capsys, words, complaint):
    from gpubridge import cli

    assert cli.main(["ray", *words]) == 1
    assert complaint in capsys.readouterr().err


def test_without_namespaces_a_local_fleet_is_refused(capsys, tmp_path, monkeypatch):
    from gpubridge import cli

    pytest.importorskip("ray.serve", reason="needs ray[serve]")
    unshare = tmp_path / "unshare"
    unshare.write_text("#!/bin/sh\necho 'not permitted' >&2\nexit 1\n")
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["ray", "up", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "Ray listens on all interfaces" in error
    assert "not permitted" in error
    unshare.unlink()
    assert cli.main(["ray", "up", str(tmp_path)]) == 1
    assert "allows no network namespace" in capsys.readouterr().err


def test_a_fleet_says_where_it_serves():
    said = places_text(FleetSettings.from_args({**MODELS, "http_port": 9000}))
    assert said.startswith(
        "serving at http://localhost:9000, gRPC localhost:8001, http://localhost:8002/metrics;"
    )
