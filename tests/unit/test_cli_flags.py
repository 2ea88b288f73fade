"""The flags of the server: all that tritonserver has, and what becomes of each."""

import argparse
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from gpubridge import cli
from gpubridge.cli.serve import server_settings
from gpubridge.config import ServerSettings
from gpubridge.config.settings import read_backend_config
from gpubridge.errors import BridgeError
from gpubridge.flags import add_flags, check_flags, declared_flags, flag, from_flags
from tests.triton_flags import NEWER, TRITON_2_51
from tests.unit.model_configs import cases

REPOSITORY = "--model-repository=/models"


def settings_of(*words, command="serve"):
    """Return the settings of a command line, without a server."""
    return server_settings(cli.command_parser(command).parse_known([REPOSITORY, *words]))


def error_of(*words, command="serve"):
    with pytest.raises((BridgeError, cli.UsageError)) as caught:
        settings_of(*words, command=command)
    return str(caught.value)


class TestTritons:
    def test_none_is_unknown(self):
        assert len(TRITON_2_51) == len(set(TRITON_2_51)) == 86
        known = cli.command_parser("tritonserver")._option_string_actions
        assert {*TRITON_2_51, *NEWER} - {*known} == set()

    @pytest.mark.parametrize(
        "words",
        [
            "--allow-sagemaker=false", "--allow-vertex-ai=0", "--grpc-use-ssl=false",
            "--grpc-use-ssl-mutual=Off", "--rate-limit=off", "--rate-limit=OFF",
            "--response-cache-byte-size=0", "--model-namespacing=false",
            "--model-load-retry-count=0", "--enable-peer-access=true",
        ],
    )  # fmt: skip
    def test_flags_that_ask_for_nothing_are_silent(self, words):
        assert settings_of(words).notices() == []

    @pytest.mark.parametrize(
        ("words", "nbytes"),
        [
            ("", 0),
            ("--cache-config=local,size=1048576", 1048576),
            ("--response-cache-byte-size=1048576", 1048576),
            ("--cache-config=local,size=5 --cache-config=local,size=7", 7),
            ("--cache-config=local,size=5 --response-cache-byte-size=0", 5),
        ],
    )
    def test_the_size_of_the_response_cache(self, words, nbytes):
        assert settings_of(*words.split()).cache_bytes == nbytes

    @pytest.mark.parametrize(
        "value",
        [
            "local",
            "local,size",
            "local,size=",
            "local,size=x",
            "local,size=-1",
            "redis,password=k5",
        ],
    )
    def test_another_cache_is_refused_without_its_settings(self, value):
        with pytest.raises(BridgeError, match="--cache-config expects local,size=BYTES") as error:
            settings_of(f"--cache-config={value}")
        assert "k5" not in error.value.message

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            ("--http-thread-count=8", "one event loop"),
            ("--grpc-infer-thread-count=4", "one event loop"),
            ("--model-load-thread-count=16", "beside each other"),
            ("--pinned-memory-pool-byte-size=0", "host memory"),
            ("--cuda-memory-pool-byte-size=0:536870912", "device-arena-bytes"),
            ("--buffer-manager-thread-count=4", "copied"),
            ("--grpc-infer-allocation-pool-size=16", "kept for reuse"),
            ("--min-supported-compute-capability=6.0", "every GPU"),
            ("--host-policy=gpu_0", "NUMA"),
            ("--cache-directory=/opt/tritonserver/caches", "a part of the server"),
            ("--rate-limit=execution_count", "as they become free"),
            ("--rate-limit-resource=R1:10:0", "no resources"),
            ("--repoagent-directory=/opt/tritonserver/repoagents", "no repository agents"),
            ("--backend-config=onnxruntime,default-max-batch-size=4", "only the Python backend"),
            ("--backend-config=tensorflow,version=2", "only the Python backend"),
        ],
    )
    def test_tuning_flags_of_triton_are_said_to_have_no_effect(self, words, why):
        (notice,) = settings_of(words).notices()
        # Without the value: it may be a secret.
        assert notice.startswith(f"{words.rpartition('=')[0]} has no effect: ")
        assert why in notice

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            ("--allow-sagemaker=true", "SageMaker's endpoint is not served"),
            ("--allow-vertex-ai=true", "Vertex AI's endpoint is not served"),
            ("--model-namespacing=true", "in all repositories"),
        ],
    )
    def test_flags_with_a_missing_effect_are_refused(self, words, why):
        assert error_of(words).startswith(words.partition("=")[0] + ": ")
        assert why in error_of(words)

    @pytest.mark.parametrize(
        ("words", "name", "value"),
        [
            (["--model-control-mode=POLL"], "repository.model_control_mode", "poll"),
            (["--gpu-fallback", "HOST"], "instances.gpu_fallback", "host"),
            (["--exit-on-error=FALSE"], "repository.exit_on_error", False),
            (["--exit-on-error=Off"], "repository.exit_on_error", False),
            (["--strict-readiness", "1"], "process.strict_readiness", True),
        ],
    )
    def test_values_are_compared_without_case(self, words, name, value):
        assert attrgetter(name)(settings_of(*words)) == value

    @pytest.mark.parametrize(
        ("given", "address"),
        [
            ("ipv6:[::1]", "::1"),
            ("[::1]", "::1"),
            ("::", "::"),
            ("ipv4:10.0.0.1", "10.0.0.1"),
            ("localhost", "localhost"),
        ],
    )
    def test_addresses_are_written_as_for_triton_or_plainly(self, given, address):
        settings = settings_of(f"--http-address={given}", f"--grpc-address={given}")
        assert settings.http.address == settings.metrics_endpoint.address == address
        assert settings.grpc.address == address

    def test_a_repository_may_be_named_twice(self):
        settings = settings_of("--model-repository=b", "--model-store=/models/", "./b")
        assert settings.repository.model_repositories == (Path("/models"), Path("b"))

    def test_a_models_directory_whose_name_is_no_text_is_refused(self, tmp_path):
        directory = tmp_path / b"m\xff".decode(errors="surrogateescape")
        (directory / "1").mkdir(parents=True)
        (directory / "1" / "model.py").touch()
        with pytest.raises(BridgeError, match=r"m.udcff' cannot be a model: its name is not UTF-8"):
            settings_of(str(directory))
        directory.rename(tmp_path / "m")
        assert settings_of(str(tmp_path / "m")).repository.model_directories == (tmp_path / "m",)

    def test_compression_and_trace_levels_are_compared_without_case(self):
        given = settings_of(
            "--grpc-infer-response-compression-level=High",
            "--trace-config=Triton,file=f", "--trace-config=level=timestamps",
            "--log-verbose=TRUE",
        )  # fmt: skip
        assert given.grpc.connections.infer_response_compression_level == "high"
        assert given.traces.level == ("TIMESTAMPS",)
        assert given.log.verbose_level == 1
        assert "invalid choice: 'iso8601'" in error_of("--log-format=iso8601")

    def test_older_flags_of_traces_are_those_of_trace_config(self):
        given = settings_of(
            "--trace-file=/tmp/t", "--trace-level=MAX", "--trace-rate=1", "--trace-count", "-1",
            "--trace-log-frequency=10",
        )  # fmt: skip
        newer = settings_of(
            "--trace-config=triton,file=/tmp/t", "--trace-config=level=TIMESTAMPS",
            "--trace-config=rate=1", "--trace-config=triton,log-frequency=10",
        )  # fmt: skip
        assert given.traces == newer.traces

    def test_completion_of_configurations_has_two_switches(self):
        assert settings_of("--strict-model-config=false").repository.auto_complete
        assert not settings_of("--strict-model-config=true").repository.auto_complete
        assert not settings_of("--disable-auto-complete-config").repository.auto_complete
        assert not settings_of(
            "--disable-auto-complete-config", "--strict-model-config=false"
        ).repository.auto_complete

    def test_metrics_follow_the_address_of_http(self):
        assert settings_of("--http-address=127.0.0.2").metrics_endpoint.address == "127.0.0.2"
        given = settings_of("--http-address=127.0.0.2", "--metrics-address=127.0.0.3")
        assert (given.metrics_endpoint.address, given.grpc.address) == ("127.0.0.3", "127.0.0.1")


class TestTls:
    FILES = ("--grpc-server-cert=c.pem", "--grpc-server-key=k.pem")

    def test_either_switch_serves_it(self):
        assert not settings_of(*self.FILES).grpc.tls.served
        assert settings_of("--grpc-use-ssl=true", *self.FILES).grpc.tls.served
        given = settings_of("--grpc-use-ssl-mutual=1", "--grpc-root-cert=r.pem", *self.FILES)
        assert given.grpc.tls.served
        assert not given.http.tls.served

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--http-use-ssl=1"], "--http-use-ssl needs --http-server-cert"),
            (["--grpc-use-ssl=1"], "--grpc-use-ssl needs --grpc-server-cert"),
            (["--grpc-use-ssl=1", FILES[0]], "--grpc-use-ssl needs --grpc-server-key"),
            (["--grpc-use-ssl-mutual=1", *FILES], "--grpc-use-ssl-mutual needs --grpc-root-cert"),
        ],
    )
    def test_its_files_are_needed(self, words, said):
        assert error_of(*words) == said

    def test_files_that_nothing_reads_are_said_to_have_no_effect(self):
        cert, key = settings_of(*self.FILES).notices()
        end = " has no effect: it is read with --grpc-use-ssl=true only"
        assert (cert, key) == (f"--grpc-server-cert{end}", f"--grpc-server-key{end}")
        (root,) = settings_of(
            "--grpc-use-ssl=1", "--grpc-root-cert=r.pem", *self.FILES
        ).notices()  # fmt: skip
        end = " has no effect: it is read with --grpc-use-ssl-mutual=true only"
        assert root == f"--grpc-root-cert{end}"


class TestTritonserver:
    def test_listens_everywhere(self):
        given = settings_of(command="tritonserver")
        assert {given.http.address, given.grpc.address, given.metrics_endpoint.address} == {
            "0.0.0.0"
        }
        given = settings_of("--http-address=127.0.0.1", command="tritonserver")
        assert (given.http.address, given.metrics_endpoint.address) == ("127.0.0.1", "127.0.0.1")
        assert given.grpc.address == "0.0.0.0"
        assert not given.memory.allow_client_shm

    def test_takes_the_beginning_of_a_flag(self):
        given = settings_of("--model-repo=/more", "--log-v=1", command="tritonserver")
        assert given.repository.model_repositories == (Path("/models"), Path("/more"))
        assert given.log.verbose_level == 1
        assert "could match --log-" in error_of("--log=1", command="tritonserver")
        assert "unknown flag --model-repo" in error_of("--model-repo=/more")

    def test_the_last_of_several_values_counts(self):
        assert settings_of("--http-port=1", "--http-port=2", command="tritonserver").http.port == 2


WRONG_FLAGS = """
--model-repositry=x
    unknown flag --model-repositry; did you mean --model-repository?
--http_port 1
    unknown flag --http_port; did you mean --http-port?
--qqqqqqq
    unknown flag --qqqqqqq
--model-path=x
    unknown flag --model-path
--http-port=abc
    argument --http-port: invalid int value: 'abc'
ftp://bucket/models
    argument REPOSITORY: expected a directory, s3://BUCKET/PATH, s3://[https://]HOST:PORT/BUCKET/PATH,
    gs://BUCKET/PATH, az://CONTAINER/PATH or as://ACCOUNT/CONTAINER/PATH, got 'ftp://bucket/models'
--allow-http=yes
    argument --allow-http: expected true or false, got 'yes'
--backend-config=python
    --backend-config expects BACKEND,KEY=VALUE, got 'python'
--http-header-forward-pattern=(
    --http-header-forward-pattern expects a regular expression (missing ), unterminated subpattern at
    position 0), got '('
--model-config-name=a/b
    --model-config-name expects a file's name, got 'a/b'
"""


@pytest.mark.parametrize(("words", "said"), cases(WRONG_FLAGS))
def test_errors_of_wrong_flags(words, said):
    assert error_of(*words.split()) == said


@pytest.mark.parametrize("entry", ["default-max-batch-size=4", "python,default-max-batch-size=4"])
def test_a_setting_of_every_backend_is_pythons(entry):
    assert read_backend_config([entry]) == {"python": {"default-max-batch-size": "4"}}


def test_a_new_flag_is_its_field():
    @dataclass(frozen=True, kw_only=True)
    class Grown(ServerSettings):
        spare_stubs: int = flag(1, "stubs kept in reserve", group="Server", least=0)

        def __post_init__(self):
            check_flags(self)

    parser = argparse.ArgumentParser()
    add_flags(parser, Grown)
    options = parser.parse_args([REPOSITORY, "--spare-stubs", "3"])
    assert from_flags(Grown, options).spare_stubs == 3
    assert "--spare-stubs N" in parser.format_help()
    (row,) = [each for each in declared_flags(Grown) if each.name == "--spare-stubs"]
    assert (row.group, row.text, row.default) == ("Server", "stubs kept in reserve", 1)
    refused: Any = parser.parse_args([REPOSITORY, "--spare-stubs=-1"])
    with pytest.raises(BridgeError, match="--spare-stubs expects an integer of at least 0, got -1"):
        from_flags(Grown, refused)
