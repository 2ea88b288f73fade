"""Start commands as people have them for tritonserver: charts, compose files, launch scripts."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from gpubridge.cli import command_parser
from gpubridge.cli.serve import server_settings
from tests.process.forked_commands import run_forked
from tests.process.server import running_server, wait_until, write_code_model, write_model

LOOPBACK = ("--http-address=127.0.0.1", "--grpc-address=127.0.0.1")

ADDRESSES = [("999.1.1.1", "address"), ("192.0.2.1", "address"), ("127.0.0.1", "port")]
COMMANDS = {
    "KServe's runtime": (
        "--model-store={models} --grpc-port=9000 --http-port=8080 --allow-grpc=true --allow-http=true"
    ),
    "ModelMesh's adapter": (
        "--model-repository={models} --model-control-mode=explicit --load-model=m "
        "--strict-model-config=false --strict-readiness=false --allow-http=true "
        "--allow-sagemaker=false"
    ),
    "Triton's chart": (
        "--model-store={models} --model-control-mode=poll --repository-poll-secs=5 "
        "--allow-gpu-metrics=false"
    ),
    "TensorRT-LLM's launcher": (
        "--grpc-port=8001 --http-port=8000 --metrics-port=8002 --model-repository={models} "
        "--disable-auto-complete-config --backend-config=python,shm-region-prefix-name=prefix0_ "
        "--pinned-memory-pool-byte-size=0 --enable-peer-access=false "
        "--cuda-memory-pool-byte-size=0:0 --cuda-memory-pool-byte-size=1:0"
    ),
    "a recommender's": (
        "--model-repository={models} --backend-config=hugectr,ps={models}/ps.json "
        "--backend-config=tensorflow,version=2 --model-control-mode=POLL "
        "--repository-poll-secs=10 --log-verbose=1"
    ),
    "a laboratory's, shared by many": (
        "--model-repository={models} --allow-cpu-metrics=true --log-info=true --log-warning=true "
        '--log-error=true --rate-limit "execution_count" --cuda-memory-pool-byte-size 0:536870912'
    ),
    "a controller's": (
        "--model-repository={models} --model-control-mode=EXPLICIT --repository-poll-secs=0 "
        "--load-model=*"
    ),
    "an image's own script": (
        "--model-repository={models} --backend-directory=/opt/tritonserver/backends "
        "--allow-gpu-metrics=false --disable-auto-complete-config --http-thread-count=8 "
        "--exit-on-error=false --exit-timeout-secs=10 --model-load-thread-count=2"
    ),
    "a compose file's": (
        "--model-repository={models} --strict-model-config=False "
        "--backend-config=python,shm-default-byte-size=268435456 --log-format=default "
        "--cache-config=local,size=1048576 --response-cache-byte-size=0 --buffer-manager-thread-count 4"
    ),
    "a tracer's": (
        "--model-repo {models} --trace-file={models}/../trace.json --trace-level=TIMESTAMPS "
        "--trace-rate=1 --metrics-interval-ms=1000 --min-supported-compute-capability=6.0"
    ),
}


STARTED = ("a compose file's", "a tracer's", "a recommender's", "a controller's")
"""What has servers do different things: caches, traces, and each mode of model control."""


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_is_understood(tmp_path, words):
    flags = shlex.split(words.format(models=tmp_path))
    settings = server_settings(command_parser("tritonserver").parse_known(flags))
    assert settings.repository.model_repositories == (tmp_path,)


@pytest.mark.parametrize("name", STARTED)
def test_starts_and_answers(tmp_path, name):
    repository = tmp_path / "models"
    write_code_model(repository)
    flags = shlex.split(COMMANDS[name].format(models=repository))
    with running_server([], *LOOPBACK, *flags, name="tritonserver") as server:
        assert server.ask("self.said = 'served'") == (200, "served")
        server.stop()
        assert "Traceback" not in server.log()


def test_the_program_starts_and_answers(tmp_path):
    write_code_model(tmp_path)
    program = "import sys; from gpubridge.cli.tritonserver import main; sys.exit(main())"
    with running_server(tmp_path, *LOOPBACK, command=("-c", program), name="") as server:
        assert server.ask("self.said = 'served'") == (200, "served")


CONFIG = """
response_cache { enable: true }
model_operations { op_library_filename: "libops.so" }
cc_model_filenames { key: "9.0" value: "model.py" }
instance_group [{ kind: KIND_CPU rate_limiter { resources [{ name: "R1" count: 1 }] } }]
"""


def test_configurations_that_triton_loads_load_with_a_warning_each(tmp_path):
    write_code_model(tmp_path, config=CONFIG)
    with running_server(tmp_path) as server:
        assert server.ask("self.said = 1") == (200, "1")
        log = server.log()
        for field in ("response_cache", "model_operations", "cc_model_filenames", "rate_limiter"):
            (line,) = [line for line in log.splitlines() if f"{field}' has no effect: " in line]
            assert line.startswith("W")


def test_limits_are_not_dropped_where_a_flag_asks_for_them_and_useless_flags_are_named_once(
    tmp_path,
):
    write_code_model(tmp_path, config=CONFIG)
    useless = ("--http-thread-count=8", "--backend-config=onnxruntime,threads=4")
    flags = ("--rate-limit=execution_count", "--exit-on-error=false", "--strict-readiness=false")
    with running_server(tmp_path, *flags, *useless, own=True) as server:
        for flag in useless:
            assert server.log().count(f"{flag.rpartition('=')[0]} has no effect: ") == 1
        (row,) = server.index().values()
        assert row["state"] == "UNAVAILABLE"
        assert "rate_limiter' is not supported yet" in row["reason"]


def test_a_named_configuration_stands_in_for_the_usual_one(tmp_path):
    for name in ("a", "b"):
        write_code_model(tmp_path, name, initialize="self.args = args")
    (tmp_path / "b" / "configs").mkdir()
    text = (tmp_path / "b" / "config.pbtxt").read_text()
    named = text + 'parameters { key: "GPU" value { string_value: "h100" } }\n'
    (tmp_path / "b" / "configs" / "h100.pbtxt").write_text(named)
    with running_server(tmp_path, "--model-config-name=h100") as server:
        asked = "self.said = 'h100' in self.args['model_config']"
        assert server.ask(asked, "a") == (200, "False")
        assert server.ask(asked, "b") == (200, "True")


@pytest.mark.parametrize("made", ["configured", "without a configuration"])
def test_one_models_directory_is_served_alone(tmp_path, made):
    write_code_model(tmp_path, "m")
    write_model(tmp_path, "broken", "raise RuntimeError('nobody asked for it')")
    if made != "configured":
        completed = (tmp_path / "m" / "1" / "model.py").read_text() + (
            "    @staticmethod\n"
            "    def auto_complete_config(config):\n"
            "        for add, name in ((config.add_input, 'IN'), (config.add_output, 'OUT')):\n"
            "            add({'name': name, 'data_type': 'TYPE_STRING', 'dims': [1]})\n"
            "        return config\n"
        )
        (tmp_path / "m" / "1" / "model.py").write_text(completed)
        (tmp_path / "m" / "config.pbtxt").unlink()
    with running_server([], str(tmp_path / "m")) as server:
        assert server.ask("self.said = 'served'") == (200, "served")
        assert {name for name, _ in server.index()} == {"m"}
        # Also of a configuration that the model has made.
        assert '"name": "IN", "datatype": "BYTES"' in server.log()


def test_one_models_directory_is_polled(tmp_path):
    write_code_model(tmp_path, "m", initialize="self.word = 'before'")
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with running_server([], str(tmp_path / "m"), *flags) as server:
        assert server.ask("self.said = self.word") == (200, "before")
        write_code_model(tmp_path, "m", initialize="self.word = 'after it'")
        write_code_model(tmp_path, "other")
        wait_until(
            lambda: server.ask("self.said = self.word") == (200, "after it"), "the change", server
        )
        assert {name for name, _ in server.index()} == {"m"}


def test_repositories_may_be_named_without_a_flag(tmp_path):
    for repository, model in (("first", "a"), ("second", "b"), ("third", "c")):
        write_code_model(tmp_path / repository, model)
    words = (str(tmp_path / "first"), str(tmp_path / "third" / "c"))
    with running_server(tmp_path / "second", *words) as server:
        assert {name for name, _ in server.index()} == {"a", "b", "c"}


def test_two_servers_may_share_a_port(tmp_path):
    write_code_model(tmp_path)
    share = ("--reuse-http-port=true", "--reuse-grpc-port=true")
    with running_server(tmp_path, *share, own=True) as server:
        ports = [url.rpartition(":")[2] for url in (server.http_url, server.grpc_url)]
        same = (f"--http-port={ports[0]}", f"--grpc-port={ports[1]}")
        with running_server(tmp_path, *share, *same, own=True) as other:
            assert (other.http_url, other.grpc_url) == (server.http_url, server.grpc_url)
            # Either of them answers that it is ready.
            wait_until(lambda: "] ready: " in other.log(), "the other to be ready", other)
            assert other.ask("self.said = 1") == (200, "1")


def test_it_is_a_program_of_the_package():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'tritonserver = "gpubridge.cli.tritonserver:main"\n' in project


@pytest.mark.parametrize(("address", "other"), ADDRESSES)
def test_an_address_in_use_names_the_flag_to_change(tmp_path, address, other):
    write_model(tmp_path, "m", "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = (f"--http-address={address}", f"--http-port={port}", "--grpc-port=0")
        done = run_forked("serve", str(tmp_path), *flags)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"error: cannot listen on {address}:{port} for HTTPService: ")
    assert said.endswith(f"; choose another {other}")


def test_ipv6(tmp_path):
    write_code_model(tmp_path)
    flags = ("--http-address=ipv6:[::1]", "--grpc-address=[::1]")
    with running_server(tmp_path, *flags, name="tritonserver") as server:
        assert server.http_url.startswith("[::1]:")
        assert server.ask("self.said = 1") == (200, "1")


def test_one_models_directory_as_a_repository_says_what_was_meant(tmp_path):
    model = write_code_model(tmp_path)
    with running_server(model, "--exit-on-error=false", ready=False) as server:
        wait_until(lambda: "] ready" in server.log(), "the loading to end", server)
        hint = f"If {model} is one model: gpubridge serve {model}"
        assert hint in server.index()["1", 0]["reason"]
