"""Each time that something falls back to a slower way, the metrics say so, and why."""

from __future__ import annotations

import json

from tests.process.server import PURE, running_server, write_code_model, write_model
from tests.process.test_kept_inputs import KEEPER

NAME = "gpubridge_fallbacks_total"
ASK = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]})


def counted(server):
    return {name: value for name, value in server.metrics().items() if name.startswith(NAME)}


def of(model, reason):
    return f'{NAME}{{model="{model}",reason="{reason}",version="1"}}'


def test_models_that_ask_for_gpus_where_there_are_none(tmp_path):
    groups = "instance_group [{ kind: KIND_GPU count: 2 }, { kind: KIND_GPU }, { kind: KIND_CPU }]"
    write_code_model(tmp_path, config=groups)
    write_code_model(tmp_path, "plain")
    with running_server(
        tmp_path, "--gpu-fallback=host", environment={"CUDA_VISIBLE_DEVICES": ""}
    ) as server:
        assert counted(server) == {of("m", "no_gpu"): 2}


def test_models_without_the_compiled_module(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path, environment=PURE) as server:
        assert counted(server) == {of("m", "native_module"): 1}
        assert "runs slower: turned off by GPUBRIDGE_NO_NATIVE=1" in server.log()
        # A stub that starts again takes the slower way again.
        server.ask("os.kill(os.getpid(), 9)")
        assert server.ask("self.said = 1") == (200, "1")
        assert counted(server)[of("m", "native_module")] == 2
        assert server.log().count("runs slower") == 1


def test_models_that_keep_their_inputs(tmp_path):
    write_model(tmp_path, "keeper", KEEPER)
    with running_server(tmp_path) as server:
        for _ in range(1200):
            assert server.request("POST", "/v2/models/keeper/infer", ASK)[0] == 200
        assert counted(server) == {of("keeper", "inputs_kept"): 1}
