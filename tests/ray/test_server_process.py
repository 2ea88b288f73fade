"""A fleet's server as a child process."""

import os
import signal

import pytest

from gpubridge.errors import BridgeError
from gpubridge.ray.server_client import (
    control_model,
    loaded_models,
    model_config,
    pending_and_restarts,
    request,
)
from gpubridge.ray.server_process import ServerProcess
from tests.process.server import alive, children, wait_until, write_code_model


def test_a_server_serves_on_its_address_until_it_is_stopped(tmp_path):
    write_code_model(tmp_path)
    server = ServerProcess([str(tmp_path)], (), "127.0.0.1")
    try:
        address, port = server.address.address, server.address.http_port
        assert server.how_ended() == ""
        assert loaded_models(address, port) == {"m": ("1",)}
        assert model_config(address, port, "m")["name"] == "m"
        assert model_config(address, port, "nothing") is None
        (stub,) = children(server.process_id)
        os.kill(stub, signal.SIGKILL)
        port_of_metrics = server.address.metrics_port
        wait_until(lambda: pending_and_restarts(address, port_of_metrics)[1] == 1, "a restart")
        assert "nothing" in control_model(address, port, "nothing", "load")
        assert control_model(address, port, "m", "unload") == ""
        assert loaded_models(address, port) == {}
        assert pending_and_restarts(address, server.address.metrics_port) == (0, 0)
        os.kill(server.process_id, signal.SIGKILL)
        wait_until(lambda: "signal 9" in server.how_ended(), "the end of the server")
        assert request(address, port, "GET", "/v2")[0] == 503
    finally:
        server.stop(30)
    assert not alive(server.process_id)


def test_a_server_that_does_not_start_says_why(tmp_path):
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.py").write_text("1 +")
    with pytest.raises(BridgeError, match=r"exit code 1(.|\n)*SyntaxError"):
        ServerProcess([str(tmp_path)], (), "127.0.0.1")
