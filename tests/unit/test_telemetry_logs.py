"""Log lines: their forms, and which of them are written."""

import fcntl
import json
import logging
import os
import re

import pytest

from gpubridge.develop.settings import run_telemetry
from gpubridge.errors import BridgeError
from gpubridge.telemetry.logs import LogSettings, ServerLog, log_from_stub

LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "V": logging.DEBUG}


@pytest.fixture
def log(tmp_path):
    """A log into a file, and a function that returns the lines there."""
    file = tmp_path / "log"
    server_log = ServerLog(LogSettings(file=str(file)))
    yield server_log, lambda: file.read_text().splitlines()
    server_log.close()


def say(text="hello", level=logging.INFO):
    logging.getLogger("gpubridge.test").log(level, text)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("default", r"I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ test_telemetry_logs\.py:\d+\] hello"),
        ("ISO8601", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ test_telemetry_logs\.py:\d+\] hello"),
    ],
)
def test_forms_of_lines(log, form, pattern):
    server_log, lines = log
    server_log.change(format=form)
    say()
    assert re.fullmatch(pattern, lines()[0])


def test_objects_hold_whatever_a_text_does(log):
    server_log, lines = log
    server_log.change(format="json")
    text = 'two\nlines with "quotes", 50% and a lone \udc80'
    log_from_stub("m", "m_0", {"level": 2, "text": text, "file": "/a/model.py", "line": 7})
    (line,) = lines()
    fields = json.loads(line)
    assert (fields["message"], fields["level"]) == (text, "error")
    assert (fields["file"], fields["line"]) == ("model.py", 7)
    assert (fields["model"], fields["instance"]) == ("m", "m_0")


def test_text_that_is_no_unicode_is_written_all_the_same(log):
    _, lines = log
    log_from_stub("m", "m_0", {"level": 0, "text": "lone \udc80", "file": "model.py", "line": 7})
    assert lines()[0].endswith("[m_0] lone \\udc80")


def test_an_exception_is_in_the_object(log):
    server_log, lines = log
    server_log.change(format="json")
    try:
        raise ValueError("deep")
    except ValueError:
        logging.getLogger("gpubridge.test").exception("failed")
    assert "ValueError: deep" in json.loads(lines()[0])["traceback"]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, "IWE"),
        ({"verbose_level": 1}, "IWEV"),
        ({"info": False}, "WE"),
        ({"info": False, "verbose_level": 4}, "WEV"),
        ({"warning": False, "error": False}, "I"),
    ],
)
def test_which_severities_are_written_and_what_stubs_are_told(log, settings, shown):
    server_log, lines = log
    server_log.change(**settings)
    for letter, level in LEVELS.items():
        say(letter, level)
    assert "".join(line[-1] for line in lines()) == shown
    assert {letter for n, letter in enumerate("IWEV") if server_log.stub_levels >> n & 1} == set(
        shown
    )


def test_listeners_hear_of_every_change(log):
    server_log, _ = log
    heard = []
    server_log.on_change(lambda: heard.append(server_log.stub_levels))
    server_log.change(verbose_level=1)
    server_log.change(verbose_level=0)
    assert heard == [0b1111, 0b0111]


def test_a_closed_log_writes_nothing(tmp_path):
    file = tmp_path / "log"
    server_log = ServerLog(LogSettings(file=str(file)))
    server_log.close()
    say()
    assert file.read_text() == ""


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(BridgeError, match=r"--log-file: cannot write to .*: Is a directory"):
        ServerLog(LogSettings(file=str(tmp_path)))


def test_a_fifo_without_a_reader_is_refused_and_one_that_is_full_loses_lines(tmp_path, capsys):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(BridgeError, match=r"--log-file: .*: no program reads this FIFO"):
        ServerLog(LogSettings(file=str(fifo)))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    server_log = ServerLog(LogSettings(file=str(fifo)))
    room = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
    for _ in range(room // 1000 + 20):
        logging.getLogger("gpubridge.test").info("x" * 1000)
    server_log.close()
    assert os.read(reader, 2 * room).startswith(b"I")
    os.close(reader)
    assert capsys.readouterr().err.count("lines of the log are lost: cannot write") == 1


def test_after_its_end_lines_go_to_the_handlers_of_the_process_as_before(caplog):
    caplog.set_level("DEBUG", "gpubridge")
    run_telemetry(0, reports_loads=True).close()
    parts = ["gpubridge.test", "gpubridge.engine.repository", "gpubridge.server"]
    for part in parts:
        logging.getLogger(part).debug("hello")
    assert [record.name for record in caplog.records] == parts
