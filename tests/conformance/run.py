"""Run the HTTP cases against one server, or against two, and report where they differ.

    python -m tests.conformance.run http://127.0.0.1:8000 --json answers.json
    python -m tests.conformance.run http://127.0.0.1:8000 http://127.0.0.1:9000
    python -m tests.conformance.run http://127.0.0.1:8000 tests/conformance/peer_http.json

Each server serves ``tests/conformance/repository``. The exit status is 1 when a case differs that has no
reason to (``Case.differs``), 0 otherwise.
"""

import argparse
import json
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.conformance.http_case import Case
from tests.conformance.http_cases import CASES
from tests.conformance.http_record import Record, ask, differences

Answers = dict[str, Record]


def collect(url: str, cases: list[Case]) -> Answers:
    """Answers of the server at ``url``, by case name."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise SystemExit(f"expected a URL like http://127.0.0.1:8000, got {url!r}")
    address = (parts.hostname, parts.port or 8000)
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError as error:
        raise SystemExit(f"no server to ask at {url}: {error}") from None
    return {case.name: ask(case, address) for case in cases}


def answers_from(source: str, cases: list[Case]) -> Answers:
    """Answers of a server, or those recorded in a file."""
    if source.startswith("http://"):
        return collect(source, cases)
    recorded: Answers = json.loads(Path(source).read_text(encoding="utf-8"))
    return recorded


def write_answers(path: Path, answers: Answers) -> None:
    """One case to a line: a change in one answer is a change in one line."""
    lines = [f"{json.dumps(name)}: {json.dumps(answers[name], sort_keys=True)}" for name in answers]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def report(cases: list[Case], ours: Answers, theirs: Answers) -> int:
    """Print the differences; returns how many cases differ without a reason."""
    unexplained = explained = absent = 0
    for case in cases:
        if case.name not in theirs:
            absent += 1
            continue
        found = differences(case, ours[case.name], theirs[case.name])
        if not found:
            continue
        if case.differs:
            explained += 1
        else:
            unexplained += 1
        print(f"{'may differ' if case.differs else 'DIFFERS'}: {case.name}")
        if case.differs:
            print(f"    {case.differs.what}: {case.differs.why or 'still to come'}")
        for name, (left, right) in found.items():
            print(f"    {name:10} A {left}\n    {'':10} B {right}")
    print(
        f"{len(cases)} cases: {unexplained} differ, {explained} may differ, {absent} not recorded"
    )
    return unexplained


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url_a", help="server to ask")
    parser.add_argument(
        "base_url_b", nargs="?", help="server, or file of recorded answers, to compare with"
    )
    parser.add_argument("--json", type=Path, help="write the answers of the first server here")
    parser.add_argument(
        "--only", default="", help="run only the cases whose name contains this text"
    )
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if options.only in case.name]
    ours = collect(options.base_url_a, cases)
    if options.json is not None:
        write_answers(options.json, ours)
    if options.base_url_b is None:
        print(f"{len(cases)} cases asked")
        return 0
    return 1 if report(cases, ours, answers_from(options.base_url_b, cases)) else 0


if __name__ == "__main__":
    sys.exit(main())
