"""The documentation site: ``./dev docs``."""

from __future__ import annotations

from devtools.console import Failed, say, timed
from devtools.environment import Checkout, need
from devtools.processes import run

__all__ = ["docs"]


def docs(checkout: Checkout, arguments: list[str]) -> None:
    """Build the site; every warning is an error."""
    if arguments not in ([], ["--external"]):
        raise Failed(f"unknown option of docs: {' '.join(arguments)}; expected --external or none")
    need(checkout, "docs")
    built = checkout.root / "build"
    targets = {"html": built / "site"}
    if arguments:
        targets["linkcheck"] = built / "sitelinkcheck"
    for builder, target in targets.items():
        options = [
            "-W",
            "--keep-going",
            "-q",
            "-b",
            builder,
            "-c",
            "docs",
            "-d",
            built / "doctrees",
        ]
        with timed(f"sphinx ({builder})"):
            command = [checkout.runner, "-m", "sphinx", *options, ".", target]
            if run(command, cwd=checkout.root):
                raise Failed("the documentation has faults; they are named above")
    say("the site is build/site/docs/index.html")
