"""Ask a model of one server, or of two, what the API does, and report where they differ.

    python -m tests.conformance.api_run http://127.0.0.1:8000 --json tests/conformance/peer_api.json
    python -m tests.conformance.api_run http://127.0.0.1:8000 http://127.0.0.1:9000
    python -m tests.conformance.api_run http://127.0.0.1:8000

Each server serves ``tests/conformance/api_repository``. Without a second server the recorded answers of
Triton 2.51 (``peer_api.json``) are what is compared with. The exit status is 1 when a case differs that
has no reason to.
"""

import argparse
import http.client
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from tests.conformance.api_cases import CASES, ApiCase
from tests.conformance.api_differences import DIFFERENCES

RECORDED = Path(__file__).with_name("peer_api.json")


def ask(case: ApiCase, address: str) -> str:
    """Have a server's model run the code of a case; returns the status and what was said."""
    tensor = {"name": "CODE", "datatype": "BYTES", "shape": [1], "data": [case.code]}
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        path = f"/v2/models/{case.model}/infer"
        connection.request("POST", path, json.dumps({"inputs": [tensor]}))
        response = connection.getresponse()
        document = json.loads(response.read())
    except OSError as error:
        return f"no answer: {type(error).__name__}"
    finally:
        connection.close()
    if response.status != 200:
        return f"{response.status} {document['error']}"
    return f"200 {document['outputs'][0]['data'][0]}"


def collect(address: str, cases: Iterable[ApiCase] = CASES) -> dict[str, str]:
    """Answers of the server at ``host:port``, by case."""
    return {case.key: ask(case, address) for case in cases}


def recorded() -> dict[str, str]:
    """The answers of Triton 2.51."""
    answers: dict[str, str] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return answers


def faults(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Say which cases differ without a reason, and which reasons have nothing to explain."""
    found = []
    expected = {key: text for entry in DIFFERENCES for key, text in entry.answers.items()}
    for case in CASES:
        here, there = ours[case.key], theirs[case.key]
        if case.key not in expected:
            if here != there:
                found.append(f"{case.key}\n    here   {here}\n    Triton {there}")
        elif here == there:
            found.append(f"{case.key}\n    does not differ any more: {here}")
        elif here != expected[case.key]:
            found.append(f"{case.key}\n    here     {here}\n    expected {expected[case.key]}")
    unknown = set(expected) - {case.key for case in CASES}
    return found + [f"a reason for a case that does not exist: {key}" for key in sorted(unknown)]


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise SystemExit(f"expected a URL like http://127.0.0.1:8000, got {url!r}")
    return f"{parts.hostname}:{parts.port or 8000}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="server to ask")
    parser.add_argument(
        "other", nargs="?", help="server to compare with; default: what is recorded"
    )
    parser.add_argument(
        "--json", type=Path, help="write the answers of the first server here, only"
    )
    options = parser.parse_args(arguments)
    ours = collect(_address(options.url))
    if options.json is not None:
        lines = [f"{json.dumps(key)}: {json.dumps(text)}" for key, text in ours.items()]
        options.json.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    theirs = recorded() if options.other is None else collect(_address(options.other))
    found = faults(ours, theirs)
    for fault in found:
        print(fault)
    for entry in DIFFERENCES:
        print(f"with a reason, {len(entry.answers)} cases: {entry.what}: {entry.why}")
    explained = sum(len(entry.answers) for entry in DIFFERENCES)
    print(f"{len(CASES)} cases: {len(found)} differ, {explained} differ with a reason")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
