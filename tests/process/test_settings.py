"""Log and trace settings through tritonclient, and what changing them changes."""

import json
import threading

import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from gpubridge.cli import main
from tests.process.flag_sets import named_and_traced
from tests.process.server import running_server, wait_until, write_code_model
from tests.waits import polling

LIBRARIES = [(over_http, "http_url"), (over_grpc, "grpc_url")]
TALK = "pb_utils.Logger.log_{level}('{text}'); self.said = 'yes'"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_code_model(repository, initialize="pb_utils.Logger.log_info('said by initialize')")
    flags = named_and_traced()
    with running_server(repository, *flags) as running:
        running.trace_file = flags[0].rpartition("=")[2]
        yield running


@pytest.fixture(autouse=True)
def as_before(server):
    yield
    document = {"log_verbose_level": 0, "log_info": True, "log_format": "default"}
    server.request("POST", "/v2/logging", json.dumps(document))
    cleared = json.dumps(dict.fromkeys(("trace_level", "trace_rate", "trace_count")))
    for path in ("/v2/trace/setting", "/v2/models/m/trace/setting"):
        assert server.request("POST", path, cleared)[0] == 200


def test_the_server_tells_the_name_that_it_was_given(server):
    with over_http.InferenceServerClient(server.http_url) as client:
        told = client.get_server_metadata()
    assert told["name"] == "mine"
    with over_grpc.InferenceServerClient(server.grpc_url) as client:
        assert client.get_server_metadata(as_json=True) == told


def say(server, level, text):
    assert server.ask(TALK.format(level=level, text=text)) == (200, "yes")


def logged(server, text):
    wait_until(lambda: text in server.log(), f"the line {text!r}", server)


def plain(settings, library):
    """Settings as HTTP tells them, whichever library asked for them."""
    if library is over_http:
        return settings
    values = {}
    for name, value in settings.settings.items():
        if hasattr(value, "value"):
            values[name] = list(value.value) if name == "trace_level" else value.value[0]
        else:
            values[name] = getattr(value, value.WhichOneof("parameter_choice"))
    return values


@pytest.mark.parametrize(("library", "url"), LIBRARIES)
def test_log_settings_are_shown_and_changed(server, library, url):
    with library.InferenceServerClient(getattr(server, url)) as client:
        before = plain(client.get_log_settings(), library)
        assert before == {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }
        wanted = {"log_verbose_level": 3, "log_format": "ISO8601", "log_info": False}
        after = plain(client.update_log_settings(wanted), library)
        assert after == {**before, **wanted}
        assert plain(client.get_log_settings(), library) == after
        with pytest.raises(InferenceServerException, match="log file location can not be updated"):
            client.update_log_settings({"log_file": "elsewhere"})


@pytest.mark.parametrize(("library", "url"), LIBRARIES)
def test_trace_settings_are_shown_changed_and_cleared(server, library, url):
    with library.InferenceServerClient(getattr(server, url)) as client:
        before = plain(client.get_trace_settings(), library)
        assert before == {
            "trace_level": ["OFF"],
            "trace_rate": "1000",
            "trace_count": "-1",
            "log_frequency": "0",
            "trace_file": server.trace_file,
            "trace_mode": "triton",
        }
        mine = client.update_trace_settings("m", {"trace_rate": "7", "trace_level": ["TENSORS"]})
        assert plain(mine, library) == {**before, "trace_rate": "7", "trace_level": ["TENSORS"]}
        all_others = plain(client.update_trace_settings(settings={"trace_count": "5"}), library)
        assert all_others == {**before, "trace_count": "5"}
        # What the model has not set is the server's; what it clears, too.
        own = plain(client.get_trace_settings("m"), library)
        assert (own["trace_rate"], own["trace_count"]) == ("7", "5")
        own = plain(client.update_trace_settings("m", {"trace_rate": None}), library)
        assert own["trace_rate"] == "1000"
        with pytest.raises(InferenceServerException, match="Request for unknown model : none"):
            client.get_trace_settings("none")
        with pytest.raises(InferenceServerException, match="Unable to parse 'trace_rate', got: x"):
            client.update_trace_settings("m", {"trace_rate": "x"})


def test_a_running_execute_is_heard_as_soon_as_its_level_is_wanted(server):
    say(server, "verbose", "not wanted yet")
    path = "/v2/logging"
    # The model waits inside of execute until it is told to go on, through its directory.
    code = """
import os, time
gate = os.path.join(os.path.dirname(__file__), 'gate')
open(gate, 'w').close()
UNTIL_GONE
pb_utils.Logger.log_verbose('wanted within execute')
self.said = gate
""".replace("UNTIL_GONE", polling("not os.path.exists(gate)"))
    thread = threading.Thread(target=server.ask, args=(code,))
    thread.start()
    gate = server_gate(server)
    wait_until(gate.exists, "execute to wait", server)
    server.request("POST", path, b'{"log_verbose_level":1}')
    gate.unlink()
    thread.join()
    logged(server, "wanted within execute")
    assert "not wanted yet" not in server.log()


def server_gate(server):
    """The file by which a test holds a model in its execute."""
    (repository,) = server.repositories
    return repository / "m" / "1" / "gate"


def test_a_model_is_heard_while_it_is_loaded(server):
    logged(server, "said by initialize")


def test_severities_are_switched_off_and_on(server):
    server.request("POST", "/v2/logging", b'{"log_info":false}')
    say(server, "info", "info while off")
    say(server, "warn", "warning meanwhile")
    logged(server, "warning meanwhile")
    server.request("POST", "/v2/logging", b'{"log_info":true}')
    say(server, "info", "info again")
    logged(server, "info again")
    assert "info while off" not in server.log()


def test_a_stub_that_starts_again_knows_what_is_logged(server):
    server.request("POST", "/v2/logging", b'{"log_verbose_level":1}')
    assert server.ask("os.kill(os.getpid(), 9)")[0] == 503
    wait_until(lambda: server.is_ready("m"), "the stub to be back", server)
    say(server, "verbose", "said by the next stub")
    logged(server, "said by the next stub")


def test_lines_become_json_objects(server):
    server.request("POST", "/v2/logging", b'{"log_format":"json"}')
    say(server, "error", "as an object, with words")
    logged(server, "as an object")
    (line,) = [line for line in server.log().splitlines() if "as an object" in line]
    fields = json.loads(line)
    assert fields["message"] == "as an object, with words"
    assert (fields["level"], fields["model"], fields["instance"]) == ("error", "m", "m_0")
    assert fields["file"]
    assert type(fields["line"]) is int
    assert fields["time"].endswith("Z")


def test_bad_settings_change_nothing(server):
    path = "/v2/logging"
    before = server.request("GET", path)[2]
    bad = b'{"log_info":false,"log_error":"no"}'
    assert server.request("POST", path, bad)[0] == 400
    assert server.request("GET", path)[2] == before
    status, _, body = server.request("POST", "/v2/trace/setting", b'{"trace_mode":"opentelemetry"}')
    assert (status, b"mode of the server" in body) == (501, True)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--trace-config", "triton,colour=red"], "expects one of level, rate"),
        (["--trace-config", "rate=0"], "sample rate must be non-zero"),
        (["--trace-rate", "0"], "sample rate must be non-zero"),
        (["--metrics-interval-ms", "0"], "--metrics-interval-ms expects a number above 0"),
        (["--log-file", "/nowhere/at/all"], "--log-file: cannot write to /nowhere/at/all"),
    ],
)
def test_flags_that_mean_nothing_are_refused_at_the_start(tmp_path, flags, text, capsys):
    assert main(["serve", "--model-repository", str(tmp_path), *flags]) in (1, 2)
    assert text in capsys.readouterr().err


def test_settings_take_4_mib_over_http(server):
    document = json.dumps({"log_info": True}).encode()
    status, _, _ = server.request("POST", "/v2/logging", document.ljust(3 << 20))
    assert status == 200
    status, _, body = server.request("POST", "/v2/logging", document.ljust(5 << 20))
    assert status == 400
    assert f"no body of {5 << 20} bytes (at most {4 << 20})" in body.decode()
