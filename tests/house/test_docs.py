"""The documents are run: their files written, their commands given, their answers compared."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpubridge import cli, pb_utils
from tests.house import flag_reference
from tests.process.server import running_server

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *(path for path in ROOT.glob("*/**/README.md") if ROOT / "build" not in path.parents),
    ]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
FIRST_SCREEN = 45
# What it says of commands is where they are going.
PLAN = ROOT / "docs" / "design.md"


def blocks(document, language):
    """The fenced blocks of a document in a language; "" for those without."""
    return [text for word, text in BLOCK.findall(document.read_text()) if word == language]


def write_files(document, folder):
    """Write the blocks that begin with a comment of their path, as the reader does."""
    for language in ("python", ""):
        for text in blocks(document, language):
            named = re.match(r"# (\S+/\S+|\S+\.py)\n", text)
            if named:
                path = folder / named[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)


def curl(command, server):
    """Do what a curl command line does, at the port of a server under test."""
    words = shlex.split(command)
    url = words.pop()
    assert url.startswith("http://127.0.0.1:8000/")
    assert words[:2] == ["curl", "-d"]
    assert len(words) == 3
    connection = http.client.HTTPConnection(server.http_url, timeout=150)
    try:
        connection.request("POST", url.removeprefix("http://127.0.0.1:8000"), words[2])
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_readme_does_what_it_says(tmp_path):
    readme = ROOT / "README.md"
    write_files(readme, tmp_path)
    steps = [line for text in blocks(readme, "sh") for line in text.splitlines()]
    assert "gpubridge serve models" in steps
    (command,) = [line for line in steps if line.startswith("curl")]
    (expected,) = blocks(readme, "json")
    with running_server(tmp_path / "models") as server:
        assert curl(command, server) == (200, expected.rstrip("\n"))
    assert json.loads(expected)["outputs"][0]["data"] == [6.5]


def test_the_quickstart_does_what_it_says(tmp_path):
    quickstart = ROOT / "docs" / "quickstart.md"
    write_files(quickstart, tmp_path)
    with running_server(tmp_path / "models") as server:
        client = tmp_path / "client.py"
        client.write_text(client.read_text().replace("127.0.0.1:8000", server.http_url))
        finished = subprocess.run(
            [sys.executable, client], capture_output=True, text=True, timeout=150, check=False
        )
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout in blocks(quickstart, "")
        assert server.log().count("loading repeat on CPU") == 2
        assert server.stop() == 0
        assert server.log().count("bye") == 2


def test_the_guide_to_models_does_what_it_says(tmp_path):
    guide = ROOT / "docs" / "models.md"
    write_files(guide, tmp_path)
    shown = blocks(guide, "")
    lines = [line for text in blocks(guide, "sh") for line in text.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("gpubridge run ")]
    assert len(commands) == 5
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if len(words) == len(commands[0]):
            assert done.stdout in shown
    assert (tmp_path / "probabilities.npy").exists()
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_softmax.py"],
        capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "2 passed" in tests.stdout, tests.stdout
    model = ["--cache-dir", str(tmp_path / "cache"), "models/softmax/1/model.py"]
    types = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *model],
        capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert types.returncode == 0, types.stdout
    with running_server(tmp_path / "models") as server:
        assert re.search(r"^I.* stdout\] \[softmax_0\] running on CPU$", server.log(), re.MULTILINE)


@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if document != PLAN],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_command_exists(document):
    usage = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, check=True)
    known = re.findall(r"^  ([a-z]+) ", usage.stdout, re.MULTILINE)
    assert {"demo", "test", "check", "bench", "gpu", "serve"} <= set(known)
    shell = [line for text in blocks(document, "sh") for line in text.splitlines()]
    prose = re.findall(r"`((?:\./dev|gpubridge) [a-z]+)", document.read_text())
    for line in shell + prose:
        words = shlex.split(line, comments=True)
        if words[:1] == ["./dev"]:
            assert words[1] in known
        elif words[:1] == ["gpubridge"]:
            assert words[1] in cli.COMMANDS
            if len(words) > 2:
                cli.command_parser(words[1]).parse_known(words[2:])
        elif words[:1] == ["tritonserver"]:
            cli.command_parser("tritonserver").parse_known(words[1:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document):
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_first_screen_shows_a_model_and_its_answer():
    screen = (ROOT / "README.md").read_text().splitlines()[:FIRST_SCREEN]
    assert "<!-- benchmarks -->" in screen
    assert any(line.startswith("class TritonPythonModel") for line in screen)
    assert any(line.startswith("gpubridge serve") for line in screen)


def test_every_public_name_is_in_the_table():
    table = (ROOT / "docs" / "compatibility.md").read_text()
    missing = [name for name in pb_utils.__all__ if not re.search(rf"\b{name}\b", table)]
    assert missing == []


def test_the_reference_of_flags_is_that_of_the_settings():
    assert flag_reference.PATH.read_text() == flag_reference.document()
