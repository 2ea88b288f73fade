"""The server's settings and the Python backend's, as the command line gives them."""

import ast
import dataclasses
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from gpubridge.config import PythonBackendSettings
from gpubridge.errors import BridgeError, ErrorCode
from tests.unit.model_configs import cases
from tests.unit.server_settings import server_settings


def test_defaults_are_tritons_and_loopback():
    settings = server_settings()
    endpoints = settings.http, settings.grpc, settings.metrics_endpoint
    assert [endpoint.port for endpoint in endpoints] == [8000, 8001, 8002]
    assert {endpoint.address for endpoint in endpoints} == {"127.0.0.1"}
    assert settings.http.max_input_size == 67108864
    assert settings.repository.model_control_mode == "none"
    assert settings.process.exit_timeout_secs == 30
    assert settings.repository.exit_on_error
    assert settings.process.strict_readiness
    assert settings.instances.stub_python == Path(sys.executable)


def test_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        server_settings().http.port = 1


WRONG = """
repository.model_repositories ()
    --model-repository expects at least one directory, got none
http.port 65536
    --http-port expects a port from 0 to 65535, got 65536
metrics_endpoint.port -1
    --metrics-port expects a port from 0 to 65535, got -1
metrics_endpoint.port 8000
    --metrics-port expects a port that --http-port does not use, got 8000
repository.model_control_mode 'auto'
    --model-control-mode expects one of none, poll, explicit, got 'auto'
instances.gpu_fallback 'cpu'
    --gpu-fallback expects one of none, host, got 'cpu'
process.exit_timeout_secs -1
    --exit-timeout-secs expects an integer of at least 0, got -1
http.max_input_size 0
    --http-max-input-size expects an integer of at least 1, got 0
memory.request_arena_limit 0
    --request-arena-limit expects an integer of at least 1, got 0
memory.output_arena_limit 0
    --output-arena-limit expects an integer of at least 1, got 0
repository.load_models ("m",)
    Use of '--load-model' requires setting '--model-control-mode=explicit' as well.
"""


@pytest.mark.parametrize(("change", "message"), cases(WRONG))
def test_refused(change, message):
    name, value = change.split(" ", 1)
    with pytest.raises(BridgeError) as caught:
        server_settings({name: ast.literal_eval(value)})
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == message


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics_endpoint.port": 8000, "metrics_endpoint.allow": False},
        {"metrics_endpoint.port": 8000, "metrics_endpoint.address": "127.0.0.2"},
        {"http.port": 0, "metrics_endpoint.port": 0},
        {"grpc.port": 8000, "grpc.allow": False},
        {"repository.load_models": ("m",), "repository.model_control_mode": "explicit"},
    ],
)
def test_accepted(changes):
    settings = server_settings(changes)
    assert {name: attrgetter(name)(settings) for name in changes} == changes


REFUSED = """
shm-default-byte-size=1048575
    shm-default-byte-size can't be smaller than 4 MiBs
shm-growth-byte-size=0
    shm-growth-byte-size can't be smaller than or equal to zero.
shm-region-prefix-name=
    shm-region-prefix-name must at least contain one character.
thread-pool-size=0
    thread-pool-size can't be less than 1.
stub-timeout-seconds=0
    stub-timeout-seconds can't be smaller than or equal to zero.
stub-timeout-seconds=-1
    stub-timeout-seconds can't be smaller than or equal to zero.
stub-timeout-seconds=inf
    stub-timeout-seconds expects a number of seconds, got 'inf'
stub-timeout-seconds=soon
    stub-timeout-seconds expects a number of seconds, got 'soon'
thread-pool-size=12ab
    thread-pool-size expects an integer, got '12ab'
input-placement=gpu
    input-placement expects one of source, device, host, got 'gpu'
device-memory-handles=fabric
    device-memory-handles expects one of auto, legacy, fd, got 'fabric'
stub-timeout-second=1
    unknown key 'stub-timeout-second' in --backend-config=python,stub-timeout-second=...; did you mean
    'stub-timeout-seconds'?
environment-cache=here
    environment-cache expects an absolute path, got 'here'
environment-limit-bytes=0
    environment-limit-bytes can't be less than 1.
zzz=1
    unknown key 'zzz' in --backend-config=python,zzz=...; known keys are stub-timeout-seconds,
    execute-timeout-seconds, input-placement, busy-poll-us, device-arena-bytes, device-memory-handles,
    device-events, device-lost-event-seconds, restart-backoff-limit-seconds, spare-stub-seconds,
    environment-cache, environment-limit-bytes, module-build-seconds, shm-default-byte-size, shm-growth-byte-size,
    shm-region-prefix-name, shm_message_queue_size, thread-pool-size, default-max-batch-size
"""


class TestPythonBackend:
    def test_own_keys(self):
        settings = PythonBackendSettings.from_backend_config(
            {
                "stub-timeout-seconds": "2.5",
                "execute-timeout-seconds": "3",
                "input-placement": "host",
                "device-memory-handles": "fd",
                "environment-cache": "/var/environments",
                "environment-limit-bytes": "1000",
                "restart-backoff-limit-seconds": "0.5",
            }
        )
        assert settings == PythonBackendSettings(
            2.5,
            3,
            "host",
            device_memory_handles="fd",
            environment_cache=Path("/var/environments"),
            environment_limit_bytes=1000,
            restart_backoff_limit_seconds=0.5,
        )

    def test_tritons_keys_are_taken_and_said_to_do_nothing(self):
        given = {
            "shm-default-byte-size": "1048576",
            "shm-growth-byte-size": "1",
            "shm-region-prefix-name": "p",
            "shm_message_queue_size": "1000",
            "thread-pool-size": "1",
            "default-max-batch-size": "4",
        }
        notices = PythonBackendSettings.from_backend_config(given).notices
        assert [notice.split(" has no effect")[0] for notice in notices] == [
            f"--backend-config=python,{key}={value}" for key, value in given.items()
        ]

    @pytest.mark.parametrize(("given", "message"), cases(REFUSED))
    def test_refused(self, given, message):
        key, _, value = given.partition("=")
        with pytest.raises(BridgeError) as caught:
            PythonBackendSettings.from_backend_config({key: value})
        assert caught.value.code is ErrorCode.INVALID_ARG
        assert caught.value.message == message
