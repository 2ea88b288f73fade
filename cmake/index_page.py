"""Makes a package index show the project as its repository does: ``index_page.py URL REVISION``.

The address of the repository is known where a release is built, not in a checkout that may be a fork.
Run in a checkout before its packages are built, this adds ``[project.urls]`` to pyproject.toml, and makes
links of README.md absolute: an index shows that file, and not those that it refers to.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["absolute_links", "main", "project_urls"]

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#", re.IGNORECASE)


def absolute_links(text: str, url: str, revision: str) -> str:
    """Return Markdown whose links to files of the repository lead to ``url`` at ``revision``."""

    def absolute(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        if not _ELSEWHERE.match(target):
            target = f"{url}/{'raw' if mark else 'blob'}/{revision}/{target}"
        return f"{mark}[{words}]({target})"

    return _LINK.sub(absolute, text)


def project_urls(url: str) -> str:
    """Return the table of pyproject.toml that names the project's addresses."""
    return (
        "[project.urls]\n"
        f'Homepage = "{url}"\n'
        f'Documentation = "{url}/tree/main/docs"\n'
        f'Changelog = "{url}/blob/main/CHANGELOG.md"\n'
        f'Issues = "{url}/issues"\n'
    )


def main(arguments: list[str]) -> int:
    """Change the two files of the checkout in the working directory; returns an exit status."""
    if len(arguments) != 2 or not re.fullmatch(r"https://[^\s\"]+[^\s\"/]", arguments[0]):
        print("usage: index_page.py https://HOST/OWNER/PROJECT REVISION", file=sys.stderr)  # noqa: T201
        return 2
    url, revision = arguments
    project, readme = Path("pyproject.toml"), Path("README.md")
    settings = project.read_text()
    if "[project.urls]" in settings:
        print(f"{project} has [project.urls] already: run this once", file=sys.stderr)  # noqa: T201
        return 1
    project.write_text(f"{settings.rstrip()}\n\n{project_urls(url)}")
    readme.write_text(absolute_links(readme.read_text(), url, revision))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
