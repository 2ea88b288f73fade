"""What only a machine with a GPU can tell: ``./dev gpu``, in two calls with limits, or a part of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from devtools.console import Failed
from devtools.environment import Checkout
from devtools.gpu_page import page
from devtools.gpu_parts import CALL_SECONDS, CALLS, PARTS, WITHOUT_GPU, Lane
from devtools.timed_parts import PASSED, Part, PartRunner

__all__ = ["gpu", "run_parts"]

_PART_SECONDS = 300.0


def gpu(checkout: Checkout, arguments: list[str]) -> None:
    """Run one of the calls, both of them, or a part with its arguments.

    Raises
    ------
    Failed
        A part did not pass, or is unknown.
    """
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if name not in ("", *CALLS, *PARTS):
        raise Failed(
            f"unknown part of gpu: {name}; expected first, second, none for both, or one of "
            f"{', '.join(PARTS)}"
        )
    options, rest = _parser().parse_known_args(arguments[bool(name) :])
    if rest and name not in PARTS:
        raise Failed(f"unknown argument of gpu: {rest[0]}; expected --output, --wheels or --limit")
    lane = Lane(checkout.root, checkout.python, options.wheels.resolve(), options.output.resolve())
    lane.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for call in [name] if name else CALLS:
        names = CALLS.get(call, ("probe", call) if call not in WITHOUT_GPU else (call,))
        # Each is made when those before it have run: they install what it looks for.
        parts = (PARTS[each](lane, rest if each == name else ()) for each in names)
        failed += run_parts(lane, call, parts, options.limit)
    if failed:
        raise Failed(f"{', '.join(failed)}: not as it should be; see the files in {lane.output}")


def run_parts(lane: Lane, call: str, parts: Iterable[Part], limit: float | None) -> list[str]:
    """Run parts, with their share of a limit if one is given; return the names of those that did not pass.

    What there is so far is in the folder of results after each part, and the page is printed at the end.
    """
    most = CALL_SECONDS.get(call, _PART_SECONDS)
    share = 1.0 if limit is None else limit / most
    runner = PartRunner(call, lane.output, lane.root, lane.variables(), most * share)
    text = ""
    for part in parts:
        seconds = part.seconds if part.seconds is None else part.seconds * share
        runner.run(replace(part, seconds=seconds))
        text = page(call, lane.output, [asdict(record) for record in runner.records])
        (lane.output / f"{call}.md").write_text(text, encoding="utf-8")
    print(text, flush=True)
    return [record.part for record in runner.records if record.outcome != PASSED]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev gpu", allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, default=Path("build/gpu-results"), metavar="DIR")
    add("--wheels", type=Path, default=Path(".whl"), metavar="DIR")
    add("--limit", type=float, metavar="SECONDS", help="of the call; its parts' in proportion")
    return parser
