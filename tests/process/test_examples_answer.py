"""Each example as its README shows it: served, asked by its client, and compared line by line."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from tests.process.forked_commands import run_script
from tests.process.server import running_server

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHOWN = re.compile(r"^```\n\$ python (.*)\n((?:.*\n)*?)```$", re.MULTILINE)
# These have tests of their own: what they print holds times, or they need a GPU or networks.
ELSEWHERE = {"cupy_addsub", "image_preproc", "ocr_pipeline", "pytorch_addsub"}
NEEDS = {"jax_add_sub": "jax", "text_topics": "wordllama"}
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extra] if name in NEEDS else [])
        for name in NAMES
        if name not in ELSEWHERE
    ],
)
def test_an_example_answers_what_its_readme_shows(name):
    package = NEEDS.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    shown = SHOWN.findall((EXAMPLES / name / "README.md").read_text())
    assert shown, "the README shows no command with its output"
    with running_server(EXAMPLES / name / "model_repository") as server:
        ports = {
            "127.0.0.1:8000": server.http_url,
            "127.0.0.1:8001": server.grpc_url,
            "127.0.0.1:8002": server.metrics_url,
        }
        for line, output in shown:
            words = [ports.get(word, word) for word in shlex.split(line)]
            finished = run_script(*words, cwd=ROOT)
            assert (finished.returncode, finished.stderr) == (0, ""), server.log()
            assert finished.stdout == output
        assert server.stubs()
        server.unload_all()
        assert "Traceback" not in server.log()


def test_every_example_is_in_the_list():
    listed = re.findall(
        r"^\| \[(\w+)\]\(\1/README\.md\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == NAMES
