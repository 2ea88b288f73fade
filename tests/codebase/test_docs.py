"""The documents are run: their files written, their commands given, their answers compared.

Their links lead somewhere, the paths that they name exist, and each page is in the site's tree.
"""

import functools
import http.client
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gpubridge
from benchmarks import readme
from devtools.commands import COMMANDS
from gpubridge import cli, pb_utils
from gpubridge.engine.devices.copies import PEER_FALLBACKS
from gpubridge.telemetry.own_metrics import OWN_FAMILIES
from gpubridge.transport.messages import FALLBACKS
from tests import first_answers
from tests.codebase import references
from tests.commands import PYTEST, run_command
from tests.process.forked_commands import run_forked, run_script, servers_are_forked
from tests.process.server import running_server

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "examples")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in ROOT.glob(f"{name}/**/*.md"))]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)")
# A page that a text of the package names: in --help, and so in docs/reference/flags.md.
NAMED_PAGE = re.compile(r"\bdocs/[\w./-]+\.md(?:#[\w-]+)?")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A path of the source tree, from the repository's root on.
SOURCE_PATH = re.compile(
    r"`((?:gpubridge|csrc|tests|benchmarks|cmake|docs|deploy|examples)/[\w./*-]+)`"
)
FIRST_SCREEN = 45
SITE = ROOT / "docs" / "index.md"


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


def flags_of(document):
    """The flags with which a document serves its models."""
    lines = [line for text in blocks(document, "sh") for line in text.splitlines()]
    (words,) = [shlex.split(line) for line in lines if line.startswith("gpubridge serve models")]
    return words[3:]


@pytest.mark.parametrize(
    "page",
    [
        "tutorials/quickstart",
        "tutorials/gpu-image-model",
        "tutorials/from-triton",
        "how-to/batching",
        "how-to/shared-memory",
    ],
)
def test_a_page_with_a_client_does_what_it_says(page, tmp_path):
    document = ROOT / "docs" / f"{page}.md"
    write_files(document, tmp_path)
    for text in blocks(document, "sh"):
        for made in re.findall(r"^mkdir -p (\S+)$", text, re.MULTILINE):
            (tmp_path / made).mkdir(parents=True, exist_ok=True)
    flags = flags_of(document) if "gpubridge serve models" in document.read_text() else []
    with running_server(tmp_path / "models", *flags) as server:
        client = tmp_path / "client.py"
        text = client.read_text().replace("127.0.0.1:8000", server.http_url)
        text = text.replace("127.0.0.1:8001", server.grpc_url)
        # Another run of the tests has a region of that name, too.
        client.write_text(text.replace("gpubridge_example", f"gpubridge_example_{os.getpid()}"))
        finished = run_script(str(client), cwd=ROOT)
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout in blocks(document, "")
        if page == "tutorials/quickstart":
            assert server.stop() == 0
            assert server.log().count("loading repeat on CPU") == 2
            assert server.log().count("bye") == 2


@pytest.mark.parametrize("name", first_answers.PAGES)
def test_a_first_answer_is_a_few_lines_away(name, tmp_path):
    page = first_answers.PAGES[name]
    typed = first_answers.commands(page)
    if name == "quickstart":
        # The model is the newcomer's own, too.
        typed += blocks(page, "python")[0].splitlines()
    assert len(typed) < 15
    assert typed[0] == "pip install ."
    answer = first_answers.first_answer(page, tmp_path, Path(sys.executable).parent)
    assert answer in [*blocks(page, "json"), *blocks(page, "")]


def test_the_client_of_the_quickstart_asks_the_first_model_too(tmp_path):
    page = first_answers.PAGES["quickstart"]
    write_files(page, tmp_path)
    client = tmp_path / "client.py"
    with servers_are_forked(), gpubridge.Server(tmp_path / "app.py") as server:
        client.write_text(client.read_text().replace("127.0.0.1:8000", server.http_address))
        finished = run_script(str(client))
    assert finished.stdout in blocks(page, ""), finished.stderr


def test_the_guide_to_models_does_what_it_says(tmp_path):
    guide = ROOT / "docs" / "how-to" / "models.md"
    debugging = ROOT / "docs" / "how-to" / "debugging.md"
    write_files(guide, tmp_path)
    shown = blocks(guide, "")
    shell = [*blocks(guide, "sh"), *blocks(debugging, "sh")]
    lines = [line for text in shell for line in text.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("gpubridge run ")]
    assert len(commands) == 5
    for words in commands:
        done = run_forked(*words[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if len(words) == len(commands[0]):
            assert done.stdout in shown
    assert (tmp_path / "probabilities.npy").exists()
    with running_server(tmp_path / "models") as server:
        assert re.search(r"^I.* stdout\] \[softmax_0\] running on CPU$", server.log(), re.MULTILINE)


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """Run the script ask.py of a guide, which starts its own server; returns what it printed."""

    def run():
        monkeypatch.chdir(tmp_path)
        with servers_are_forked():
            runpy.run_path("ask.py", run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_guide_to_python_does_what_it_says(tmp_path, asked):
    guide = ROOT / "docs" / "how-to" / "python.md"
    write_files(ROOT / "docs" / "how-to" / "models.md", tmp_path)
    write_files(guide, tmp_path)
    assert asked() in blocks(guide, "")
    tests = subprocess.run(
        # One of each guide.
        [*PYTEST, *tmp_path.glob("test_*.py")],
        capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "4 passed" in tests.stdout, tests.stdout


def test_the_guide_to_models_in_one_file_does_what_it_says(tmp_path, asked):
    guide = ROOT / "docs" / "how-to" / "one-file.md"
    write_files(guide, tmp_path)
    (run,) = [line for text in blocks(guide, "sh") for line in text.splitlines() if " run " in line]
    assert asked() in blocks(guide, "")
    done = run_forked(*shlex.split(run)[1:], cwd=tmp_path)
    assert done.stdout == "PROBABILITIES: FP32 [2, 2]\n  [[0.5, 0.5],\n   [0.5, 0.5]]\n", (
        done.stderr
    )


def test_every_command_exists():
    shell = [
        line for page in DOCUMENTS for text in blocks(page, "sh") for line in text.splitlines()
    ]
    prose = [
        words
        for page in DOCUMENTS
        for words in re.findall(r"`((?:\./dev|gpubridge) [a-z-]+)", page.read_text())
    ]
    parser = functools.cache(cli.command_parser)
    for line in {*shell, *prose}:
        words = shlex.split(line, comments=True)
        if words[:1] == ["./dev"]:
            assert words[1] in {*COMMANDS, "help"}, line
        elif words[:1] == ["gpubridge"]:
            assert words[1] in cli.COMMANDS, line
            if len(words) > 2:
                parser(words[1]).parse_known(words[2:])
        elif words[:1] == ["tritonserver"]:
            parser("tritonserver").parse_known(words[1:])


@functools.cache
def slugs(document):
    """The anchors of a document's headings, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title) for title in HEADING.findall(text)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def test_every_link_leads_somewhere():
    for document in DOCUMENTS:
        for target, anchor in LINK.findall(document.read_text()):
            path = document.parent / target if target else document
            assert path.exists(), f"{document} links to {target}"
            if anchor and path.suffix == ".md":
                assert anchor in slugs(path.resolve()), f"{document} links to {target}#{anchor}"


def test_every_heading_that_the_package_names_exists():
    texts = "".join(path.read_text() for path in ROOT.glob("gpubridge/**/*.py"))
    # Literals that are split over two lines are joined again.
    named = NAMED_PAGE.findall(re.sub(r'"\n\s+f?"', "", texts))
    assert named
    for target in named:
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), f"the package names {target}"
        assert anchor in slugs(ROOT / path), f"{target} names no heading"


def test_every_path_of_the_source_tree_exists():
    for document in DOCUMENTS:
        named = [path.rstrip("/.") for path in SOURCE_PATH.findall(document.read_text())]
        assert [path for path in named if not list(ROOT.glob(path))] == [], document


def test_every_class_of_the_explanations_exists():
    files = [
        path for folder in ("gpubridge", "csrc") for path in ROOT.glob(f"{folder}/**/*.[pch]*")
    ]
    sources = "".join(path.read_text(errors="replace") for path in files if path.suffix != ".pyc")
    known = set(re.findall(r"\w+", sources)) | {"Machine"}
    text = "".join(path.read_text() for path in ROOT.glob("docs/explanation/*.md"))
    named = re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?`", text)
    assert {name for pair in named for name in pair if name} - known == set()


def test_the_architecture_names_every_package():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    parts = [path for path in (ROOT / "gpubridge").glob("[a-z]*") if path.suffix in ("", ".py")]
    parts = [path for path in parts if path.suffix or (path / "__init__.py").exists()]
    names = [f"gpubridge/{path.name}" + ("" if path.suffix else "/") for path in parts]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_page_is_in_the_tree_of_the_site():
    listed = set()
    for page in ROOT.glob("docs/**/*.md"):
        lines = [line for tree in TOCTREE.findall(page.read_text()) for line in tree.splitlines()]
        for line in lines:
            if line and not line.startswith(":"):
                found = [path.resolve() for path in page.parent.glob(f"{line}.md")]
                assert found, f"the tree of {page.name} names {line}"
                listed.update(found)
    assert sorted({*DOCUMENTS} - {SITE} - listed) == []


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs"]
    built = run_command(
        [*command, "-d", tmp_path / "doctrees", ".", tmp_path / "site"], timeout=250, cwd=ROOT
    )
    assert built.returncode == 0, built.stderr
    assert "TritonPythonModel" in (tmp_path / "site" / "README.html").read_text()
    page = (tmp_path / "site" / "docs" / "reference" / "pb_utils.html").read_text()
    called = [name for name in pb_utils.__all__ if callable(getattr(pb_utils, name))]
    assert [name for name in called if f'id="gpubridge.pb_utils.{name}"' not in page] == []


def test_the_first_screen_says_what_why_and_how():
    screen = (ROOT / "README.md").read_text().splitlines()[:FIRST_SCREEN]
    assert "<!-- benchmarks -->" in screen
    ratios = [re.search(r"\*\*([\d.]+)×\*\*", line) for line in screen]
    assert len([found for found in ratios if found]) >= 4
    assert next(line for line in screen if "**" in line).startswith("| JSON in and out")
    assert any("](docs/pictures/" in line for line in screen)
    assert {"pip install .", "gpubridge serve models"} <= set(screen)
    assert [line.split()[1] for line in screen if line.startswith("./dev ")] == ["demo", "test"]


def test_the_figures_of_the_readme_are_those_of_the_recorded_runs():
    text = (ROOT / "README.md").read_text()
    assert readme.replaced(text, readme.recorded()) == text, "python -m benchmarks.readme"


def test_every_public_name_is_in_the_table():
    table = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    missing = [name for name in pb_utils.__all__ if not re.search(rf"\b{name}\b", table)]
    assert missing == []


@pytest.mark.parametrize("page", references.PAGES, ids=lambda path: path.name)
def test_a_generated_page_is_what_the_code_declares(page):
    assert page.read_text() == references.PAGES[page]()


def test_every_reason_of_a_fallback_is_in_the_page_of_metrics():
    calls = re.compile(r'\b(?:_fall_back|_switch|NoPeerCopy)\(\s*"(\w+)"')
    sources = "".join(path.read_text() for path in ROOT.glob("gpubridge/**/*.py"))
    counted = set(calls.findall(sources))
    assert len(counted) > 10
    assert counted == {*FALLBACKS, *PEER_FALLBACKS}


def test_the_page_of_metrics_has_those_of_a_server(tmp_path):
    write_files(ROOT / "README.md", tmp_path)
    with running_server(tmp_path / "models") as server:
        names = {re.sub(r"\{.*", "", name) for name in server.metrics()}
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    parts = {f"{name}_{part}" for name in documented for part in ("bucket", "sum", "count")}
    assert "nv_inference_count" in names
    assert names - documented - parts == set()
    # Models may not use them.
    assert {name for name in documented if re.match("nv_|gpubridge_", name)} <= OWN_FAMILIES
