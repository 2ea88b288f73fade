"""Output and failures of models, in the server's log with their names."""

import json
import os
import re

import pytest

from tests.process.forked_commands import run_forked
from tests.process.server import open_files, running_server, wait_until, write_code_model


@pytest.fixture
def server(tmp_path):
    """A server of one model of one process."""
    write_code_model(tmp_path, config="instance_group [{ count: 1 kind: KIND_CPU }]")
    with running_server(tmp_path) as server:
        yield server


def logged(server, pattern):
    """Wait for a line of the log; returns the match."""
    wait_until(lambda: re.search(pattern, server.log(), re.MULTILINE), pattern, server)
    return re.search(pattern, server.log(), re.MULTILINE)


def pipes(server):
    """Return the number of pipe ends that a server has open."""
    return sum(link.startswith("pipe:") for link in open_files(server.pid))


def test_both_streams_have_the_models_name(server):
    assert server.ask("print('one', end=' '); print('and\\ntwo'); print(file=sys.stdout)")[0] == 200
    assert server.ask("print('oh', file=sys.stderr)")[0] == 200
    logged(server, r"^I\d{4} [\d:.]+ \d+ stdout\] \[m_0_0\] one and$")
    logged(server, r"stdout\] \[m_0_0\] two$")
    logged(server, r"^W\d{4} [\d:.]+ \d+ stderr\] \[m_0_0\] oh$")


def test_what_is_printed_and_logged_keeps_its_order(server):
    code = """
print('first'); pb_utils.Logger.log_info('second'); print('third', file=sys.stderr)
pb_utils.Logger.log_warn('fourth'); sys.stdout.write('fifth'); pb_utils.Logger.log_error('sixth')
os.system('echo seventh'); print('last')
"""
    assert server.ask(code)[0] == 200
    logged(server, r"\] last$")
    told = re.findall(
        r"^(\w)\d+ .* ([^ :]+)(?::\d+)?\] \[m_0_0\] (\w+)$", server.log(), re.MULTILINE
    )
    assert told[-8:] == [
        ("I", "stdout", "first"),
        ("I", "<string>", "second"),
        ("W", "stderr", "third"),
        ("W", "<string>", "fourth"),
        ("I", "stdout", "fifth"),
        ("E", "<string>", "sixth"),
        ("I", "stdout", "seventh"),
        ("I", "stdout", "last"),
    ]


def test_lines_are_what_a_terminal_would_show(server):
    code = r"os.write(1, b'1%\r50%\r100%\nwind\xf6ws\r\n' + b'x' * 20000 + b'\nend\n')"
    assert server.ask(code)[0] == 200
    logged(server, r"\] 100%$")
    logged(server, r"\] wind\\xf6ws$")
    logged(server, r"\] end$")
    pieces = re.findall(r"\[m_0_0\] (x+)$", server.log(), re.MULTILINE)
    assert sum(map(len, pieces)) == 20000
    assert max(map(len, pieces)) == 8192


def test_last_words_come_before_the_end(server):
    status, _ = server.ask("os.write(2, b'these are my last words'); os._exit(3)")
    assert status == 503
    assert server.log().index("my last words") < server.log().index("exited with code 3")


def test_a_child_that_lives_on_keeps_nothing_from_going_on(server):
    before = pipes(server)
    # In a session and with an environment of its own, so that it is not ended with the stub; it holds
    # both pipes.
    child = (
        "import subprocess; self.said = subprocess.Popen([sys.executable, '-c', 'import signal; "
        "signal.pause()'], start_new_session=True, env={}).pid"
    )
    status, pid = server.ask(child)
    try:
        assert status == 200
        assert server.ask("os._exit(4)")[0] == 503
        logged(server, "instance 'm_0_0' is ready again")
        assert server.ask("self.said = 1") == (200, "1")
        assert pipes(server) == before
    finally:
        os.kill(int(pid), 9)


def test_exceptions_of_execute_are_logged(server):
    status, error = server.ask("undefined_variable")
    assert status == 500
    assert error.startswith(
        "Failed to process the request(s) for model 'm_0_0', message: NameError"
    )
    logged(
        server, r"^E.*\] \[m_0_0\] Failed to process the request\(s\) for model 'm_0_0', message:"
    )


def test_no_command_line_is_the_models(server):
    assert server.ask("self.said = sys.argv") == (200, "['']")


def test_it_goes_where_the_log_goes(tmp_path):
    code = "print('hello'); print('quiet', file=sys.stderr); raise ValueError('no')"
    write_code_model(tmp_path / "models", initialize=code)
    file = tmp_path / "log.json"
    flags = [f"--allow-{endpoint}=false" for endpoint in ("http", "grpc", "metrics")]
    flags += [f"--log-file={file}", "--log-format=json", "--log-warning=false"]
    done = run_forked("serve", str(tmp_path / "models"), *flags)
    assert (done.returncode, done.stdout) == (1, "")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (line,) = [line for line in lines if line["message"] == "hello"]
    assert (line["level"], line["model"], line["instance"]) == ("info", "m", "m_0")
    assert line["file"] == "stdout"
    assert "quiet" not in file.read_text()
