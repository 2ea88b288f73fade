"""Settings of the documentation site, which ``./dev docs`` builds with Sphinx.

Its sources are the files of the repository as they are: the same links work on disk, on a code host
and in the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_VERSION = re.search(r'__version__ = "(.+)"', (_ROOT / "gpubridge" / "__init__.py").read_text())

project = "gpubridge"
release = _VERSION[1] if _VERSION else ""
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "examples/**.md",
]
exclude_patterns = [".*", "build", "demo-output"]

myst_heading_anchors = 4
# Words of configurations in the text, which are no roles of Sphinx.
suppress_warnings = ["misc.highlighting_failure"]
# The reference of pb_utils is that of its Python classes, which have the docstrings.
os.environ["GPUBRIDGE_NO_NATIVE"] = "1"
autodoc_typehints = "description"
# Slots are members already; attributes of docstrings are fields of their class, not a second entry.
napoleon_use_ivar = True
nitpicky = False

html_theme = "furo"
html_title = f"gpubridge {release}"
html_static_path: list[str] = []
linkcheck_timeout = 20
