"""Start commands as people have them for tritonserver: charts, compose files, launch scripts."""

import shlex
import socket
from pathlib import Path

import pytest

from gpubridge.cli import command_parser
from gpubridge.cli.serve import server_settings
from tests.process.forked_commands import run_forked
from tests.process.server import running_server, wait_until, write_code_model, write_model
from tests.unit.model_configs import cases

ADDRESSES = [("999.1.1.1", "address"), ("192.0.2.1", "address"), ("127.0.0.1", "port")]
COMMANDS = dict(
    cases(
        """
KServe's runtime
    --model-store={models} --grpc-port=9000 --http-port=8080 --allow-grpc=true --allow-http=true
ModelMesh's adapter
    --model-repository={models} --model-control-mode=explicit --load-model=m --strict-model-config=false
    --strict-readiness=false --allow-http=true --allow-sagemaker=false
Triton's chart
    --model-store={models} --model-control-mode=poll --repository-poll-secs=5 --allow-gpu-metrics=false
TensorRT-LLM's launcher
    --grpc-port=8001 --http-port=8000 --metrics-port=8002 --model-repository={models}
    --disable-auto-complete-config --backend-config=python,shm-region-prefix-name=prefix0_
    --pinned-memory-pool-byte-size=0 --enable-peer-access=false --cuda-memory-pool-byte-size=0:0
    --cuda-memory-pool-byte-size=1:0
a recommender's
    --model-repository={models} --backend-config=hugectr,ps={models}/ps.json
    --backend-config=tensorflow,version=2 --model-control-mode=POLL --repository-poll-secs=10
    --log-verbose=1
a laboratory's, shared by many
    --model-repository={models} --allow-cpu-metrics=true --log-info=true --log-warning=true --log-error=true
    --rate-limit "execution_count" --cuda-memory-pool-byte-size 0:536870912
a controller's
    --model-repository={models} --model-control-mode=EXPLICIT --repository-poll-secs=0 --load-model=*
an image's own script
    --model-repository={models} --backend-directory=/opt/tritonserver/backends --allow-gpu-metrics=false
    --disable-auto-complete-config --http-thread-count=8 --exit-on-error=false --exit-timeout-secs=10
    --model-load-thread-count=2
a compose file's
    --model-repository={models} --strict-model-config=False
    --backend-config=python,shm-default-byte-size=268435456 --log-format=default
    --cache-config=local,size=1048576 --response-cache-byte-size=0 --buffer-manager-thread-count 4
a tracer's
    --model-repo {models} --trace-file={models}/../trace.json --trace-level=TIMESTAMPS --trace-rate=1
    --metrics-interval-ms=1000 --min-supported-compute-capability=6.0
"""
    )
)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_is_understood(tmp_path, words):
    flags = shlex.split(words.format(models=tmp_path))
    settings = server_settings(command_parser("tritonserver").parse_known(flags))
    assert settings.repository.model_repositories == (tmp_path,)


def test_the_program_starts_with_the_flags_of_a_tracer_and_a_compose_file_and_answers_over_ipv6(
    tmp_path,
):
    repository = tmp_path / "models"
    write_code_model(repository)
    program = "import sys; from gpubridge.cli.tritonserver import main; sys.exit(main())"
    words = COMMANDS["a tracer's"], COMMANDS["a compose file's"].partition(" ")[2]
    flags = shlex.split(" ".join(words).format(models=repository))
    addresses = ("--http-address=ipv6:[::1]", "--grpc-address=[::1]")
    with running_server([], *addresses, *flags, command=("-c", program), name="") as server:
        assert server.http_url.startswith("[::1]:")
        assert server.ask("self.said = 'served'") == (200, "served")
        assert server.stop() == 0
        assert "Traceback" not in server.log()


CONFIG = """
response_cache { enable: true }
model_operations { op_library_filename: "libops.so" }
cc_model_filenames { key: "9.0" value: "model.py" }
instance_group [{ kind: KIND_CPU rate_limiter { resources [{ name: "R1" count: 1 }] } }]
"""
COMPLETE = """
    @staticmethod
    def auto_complete_config(config):
        for add, name in ((config.add_input, 'IN'), (config.add_output, 'OUT')):
            add({'name': name, 'data_type': 'TYPE_STRING', 'dims': [1]})
        return config
"""
USELESS = ("--http-thread-count=8", "--backend-config=onnxruntime,threads=4")
SHARE = ("--reuse-http-port=true", "--reuse-grpc-port=true")


def test_configurations_that_triton_loads_load_with_a_warning_each(tmp_path):
    write_code_model(tmp_path, config=CONFIG)
    with running_server(tmp_path) as server:
        assert server.ask("self.said = 1") == (200, "1")
        log = server.log()
        for field in ("response_cache", "model_operations", "cc_model_filenames", "rate_limiter"):
            (line,) = [line for line in log.splitlines() if f"{field}' has no effect: " in line]
            assert line.startswith("W")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The repositories of `server`: some of several models, and models that are named alone."""
    folder = tmp_path_factory.mktemp("repositories")
    write_code_model(folder / "first", "a")
    write_code_model(folder / "first", "limited", config=CONFIG)
    named = write_code_model(folder / "second", "b")
    (named / "configs").mkdir()
    text = (named / "config.pbtxt").read_text()
    text += 'parameters { key: "GPU" value { string_value: "h100" } }\n'
    (named / "configs" / "h100.pbtxt").write_text(text)
    for name in "cd":
        alone = write_code_model(folder / "alone", name)
    (alone / "config.pbtxt").unlink()
    source = alone / "1" / "model.py"
    source.write_text(source.read_text() + COMPLETE)
    write_model(folder / "alone", "broken", "raise RuntimeError('nobody asked for it')")
    write_code_model(folder, "model")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    words = [str(folder / name) for name in ("first", "alone/c", "alone/d")]
    flags = ("--rate-limit=execution_count", "--exit-on-error=false", "--strict-readiness=false")
    named = "--model-config-name=h100"
    repositories = [folder / "second", folder / "model"]
    with running_server(repositories, *words, *flags, named, *USELESS, *SHARE) as running:
        wait_until(lambda: "] ready" in running.log(), "the loading to end", running)
        yield running


def test_repositories_and_models_may_be_named_without_a_flag(server):
    assert {name for name, _ in server.index()} == {*"abcd1", "limited"}
    for name in "abcd":
        assert server.ask("self.said = 'served'", name) == (200, "served")
    # Also of a configuration that the model has made.
    (line,) = [line for line in server.log().splitlines() if line.endswith("/v2/models/d/infer")]
    assert '"name": "IN", "datatype": "BYTES"' in line


def test_limits_are_not_dropped_where_a_flag_asks_for_them_and_useless_flags_are_named_once(server):
    for flag in USELESS:
        assert server.log().count(f"{flag.rpartition('=')[0]} has no effect: ") == 1
    (row,) = [row for (name, _), row in server.index().items() if name == "limited"]
    assert row["state"] == "UNAVAILABLE"
    assert "rate_limiter' is not supported yet" in row["reason"]


def test_a_named_configuration_stands_in_for_the_usual_one(server):
    asked = "self.said = 'h100' in self.args['model_config']"
    assert server.ask(asked, "a") == (200, "False")
    assert server.ask(asked, "b") == (200, "True")


def test_one_models_directory_as_a_repository_says_what_was_meant(server, folder):
    model = folder / "model"
    hint = f"If {model} is one model: gpubridge serve {model}"
    assert hint in server.index()["1", 0]["reason"]


def test_two_servers_may_share_a_port(server, folder):
    ports = [url.rpartition(":")[2] for url in (server.http_url, server.grpc_url)]
    same = (f"--http-port={ports[0]}", f"--grpc-port={ports[1]}")
    with running_server(folder / "second", *SHARE, *same, own=True) as other:
        assert (other.http_url, other.grpc_url) == (server.http_url, server.grpc_url)
        # Either of them answers that it is ready.
        wait_until(lambda: "] ready: " in other.log(), "the other to be ready", other)
        assert other.ask("self.said = 1", "b") == (200, "1")


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
