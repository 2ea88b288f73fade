"""The page of a package index has addresses of the project, and no link that leads nowhere."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
URL = "https://example.org/owner/project"


@pytest.fixture
def released(tmp_path):
    """A checkout's two files after a release has changed them."""
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    assert prepare(tmp_path, URL, "v9.9.9").returncode == 0
    return tmp_path


def prepare(folder, *arguments):
    command = [sys.executable, str(ROOT / "cmake" / "index_page.py"), *arguments]
    return run_command(command, cwd=folder)


def test_each_link_of_the_readme_leads_to_a_file_at_the_release(released):
    text = (released / "README.md").read_text()
    links = re.findall(r"(!?)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)", text)
    ours = [(mark, link) for mark, link in links if link.startswith(URL)]
    assert len(ours) > 20
    for _, link in links:
        assert link.startswith(("https://", "http://")), link
    for mark, link in ours:
        kind = "raw" if mark else "blob"
        path = link.removeprefix(f"{URL}/{kind}/v9.9.9/").partition("#")[0]
        assert path != link
        assert (ROOT / path).exists(), link


def test_nothing_but_links_is_changed(released):
    def words(text):
        return re.sub(r"\]\([^)\s]+\)", "]()", text)

    changed, original = ((at / "README.md").read_text() for at in (released, ROOT))
    assert changed != original
    assert words(changed) == words(original)


def test_the_package_names_its_addresses(released):
    before, after = ((at / "pyproject.toml").read_text() for at in (ROOT, released))
    kept, heading, added = after.partition("[project.urls]\n")
    assert kept.rstrip() == before.rstrip()
    assert heading
    urls = dict(re.findall(r'^(\w+) = "(.+)"$', added, re.MULTILINE))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(address.startswith(URL) for address in urls.values())


def test_a_second_run_changes_nothing(released):
    before = [(released / name).read_text() for name in ("README.md", "pyproject.toml")]
    again = prepare(released, URL, "v9.9.9")
    assert (again.returncode, "run this once" in again.stderr) == (1, True)
    assert [(released / name).read_text() for name in ("README.md", "pyproject.toml")] == before


@pytest.mark.parametrize(
    "arguments", [(), (URL,), ("http://example.org/p", "v1"), (f"{URL}/", "v1")]
)
def test_wrong_arguments_change_nothing(tmp_path, arguments):
    shutil.copy(ROOT / "README.md", tmp_path)
    assert prepare(tmp_path, *arguments).returncode == 2
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_the_workflow_runs_it_before_it_builds():
    steps = (ROOT / ".github/workflows/ci.yml").read_text()
    assert 0 < steps.index("cmake/index_page.py") < steps.index("pypa/cibuildwheel")
