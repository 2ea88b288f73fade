"""Coverage-guided fuzzing of the compiled module's parsers: ``./dev fuzz``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from devtools import compilers
from devtools.console import Failed, run_steps, say
from devtools.environment import Checkout, need
from devtools.processes import run

__all__ = ["fuzz"]

_SECONDS = 60
_RELEASES = range(21, 13, -1)


def fuzz(checkout: Checkout, arguments: list[str]) -> None:
    """Feed a target, or each of them, for some seconds: ``[TARGET] [SECONDS]``."""
    target, seconds = _parse(arguments)
    clangs = ("clang++", *(f"clang++-{release}" for release in _RELEASES))
    compiler = compilers.choose_compiler(*clangs)
    if compiler is None:
        raise Failed(
            "fuzzing needs clang++ and its runtime (Debian, Ubuntu: apt-get install clang-19 libclang-rt-19-dev)"
        )
    sources = checkout.root / "tests" / "fuzz" / "native"
    known = sorted(corpus.name for corpus in (sources / "corpus").iterdir())
    if target not in ("", *known):
        raise Failed(f"unknown target: {target}; expected one of {' '.join(known)}")
    need(checkout, "build")
    place = checkout.root / "build" / "fuzz" / Path(compiler).name
    compilers.build(checkout.venv / "bin", compiler, sources, place)

    def feed(name: str) -> bool:
        found = place / "found" / name
        found.mkdir(parents=True, exist_ok=True)
        options = [
            *(f"-max_total_time={seconds}", "-max_len=8192", "-timeout=20"),
            *(f"-artifact_prefix={place / name}-", "-print_final_stats=1"),
        ]
        command = [place / name, *options, found, sources / "corpus" / name]
        return run(command, cwd=checkout.root) == 0

    chosen = [target] if target else known
    run_steps(
        [(f"fuzz {name}", partial(feed, name)) for name in chosen],
        f"found something; the inputs are in {place}",
    )
    say(f"nothing found; new inputs are in {place}/found (-merge=1 keeps those that count)")


def _parse(arguments: list[str]) -> tuple[str, int]:
    """Return the target, "" for each of them, and the seconds."""
    target, *rest = arguments or [""]
    if target.isdecimal():
        target, rest = "", arguments
    if len(rest) > 1 or not all(word.isdecimal() for word in rest):
        raise Failed(f"expected fuzz [TARGET] [SECONDS], got {' '.join(arguments)}")
    return target, int(rest[0]) if rest else _SECONDS
