"""Random requests and configurations from a seed, put to Triton and to gpubridge beside each other.

    python -m tests.conformance.differential --peer build/peer --requests 3000 --configurations 40

Differences are reported by class, each with the seed of its first case; those that a row of
``docs/reference/differences.md`` explains are counted only. The exit status is 1 if others are found.
"""

import argparse
import http.client
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format  # type: ignore[import-untyped]

from tests.conformance.differential_rows import row_of
from tests.conformance.http_record import steady
from tests.conformance.peer import Side, both
from tests.conformance.random_configs import BASE, Configured, random_configuration
from tests.conformance.random_requests import Asked, random_request
from tests.waits import poll

HERE = Path(__file__).parent
CPU = "instance_group [ { kind: KIND_CPU } ]\n"
SHOWN = 300
LOAD_SECONDS = 30.0
# Name, data type, dims, batch size.
MODELS = (
    ("raw_bytes", "TYPE_UINT8", "[ -1 ]", 0),
    ("raw_batched", "TYPE_UINT8", "[ -1 ]", 8),
    ("raw_pairs", "TYPE_INT32", "[ 2, -1 ]", 0),
    ("raw_square", "TYPE_INT32", "[ -1, -1 ]", 0),
    ("raw_text", "TYPE_STRING", "[ 1 ]", 0),
    ("raw_texts", "TYPE_STRING", "[ -1 ]", 8),
)
TOLD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            (array,) = [tensor.as_numpy() for tensor in request.inputs()] or [np.zeros(0)]
            told = [str(array.dtype), array.shape, array.ravel().tolist(), request.request_id()]
            text = json.dumps([*told, json.loads(request.parameters())], default=bytes.decode)
            batch = (1,) if len(array.shape) > 1 and BATCHED else ()
            out = np.array([text.encode()], np.object_).reshape((*batch, 1))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""


@dataclass(frozen=True)
class Difference:
    """Two outcomes of one case that differ; ``kind`` and ``fault`` are its class."""

    seed: int
    kind: str
    fault: str
    theirs: str
    ours: str


@dataclass
class Findings:
    """What differed: by class the first difference, with how many there are; explained ones by their row."""

    asked: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    found: dict[tuple[str, str, str], list[Difference]] = field(default_factory=dict)

    def add(self, difference: Difference) -> None:
        """Count a difference, and keep it if no row explains it."""
        row = row_of(difference.kind, difference.fault, difference.theirs, difference.ours)
        if row is not None:
            self.explained[row] += 1
            return
        key = difference.kind, difference.fault, f"{difference.theirs[:5]}{difference.ours[:5]}"
        self.found.setdefault(key, []).append(difference)

    def report(self) -> str:
        """Return the text for the developer."""
        lines = [f"{self.asked} cases: {sum(self.explained.values())} differ as documented"]
        lines += [f"    {count:6} {row}" for row, count in self.explained.most_common()]
        for (kind, fault, _), each in sorted(self.found.items()):
            first = each[0]
            lines += [
                f"DIFFERS: {kind}, {fault or 'no fault'}: {len(each)} times, first with seed {first.seed}",
                f"    triton     {first.theirs[:SHOWN]}",
                f"    gpubridge  {first.ours[:SHOWN]}",
            ]
        lines.append(f"{len(self.found)} classes differ without a row in differences.md")
        return "\n".join(lines)


def outcome(side: Side, asked: Asked) -> str:
    """Return what a server answers, without what may differ: texts of errors, names of the server."""
    try:
        if asked.http is not None:
            return _http_outcome(asked.kind, *side.ask(*asked.http))
        assert asked.grpc is not None
        return _grpc_outcome(side, *asked.grpc)
    except TimeoutError:
        return "silent"
    except (OSError, http.client.HTTPException):
        return "died" if side.revive() else "closed"


def _http_outcome(kind: str, status: int, headers: dict[str, str], body: bytes) -> str:
    if status != 200 and kind not in ("logging", "trace"):
        return f"{status} an error" if body else f"{status}"
    if status != 200 or kind in ("index", "memory"):
        return f"{status}"
    split = int(headers.get("Inference-Header-Content-Length", len(body)))
    try:
        document = json.loads(body[:split])
    except ValueError:
        # Events of a stream, in which errors have texts.
        events = [json.loads(line) for line in body.split(b"data: ") if line.strip()]
        document = ["an error" if "error" in event else event for event in events]
    if isinstance(document, dict) and "outputs" in document and kind in ("infer", "raw"):
        document["outputs"] = _in_order(document["outputs"], body[split:])
    return f"200 {steady(json.dumps(document, sort_keys=True))}"


def _in_order(outputs: list[dict[str, Any]], tail: bytes) -> list[dict[str, Any]]:
    """Return the outputs by name, each with its bytes: their order is that of a hash table."""
    at = 0
    for output in outputs:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        output["bytes"] = tail[at : at + size].hex()
        at += size
    return sorted(outputs, key=lambda output: str(output["name"]))


def _grpc_outcome(side: Side, method: str, messages: list[Any]) -> str:
    try:
        if method == "ModelStreamInfer":
            answers = list(side.stub.ModelStreamInfer(iter(messages), timeout=10))
        else:
            answers = [getattr(side.stub, method)(messages[0], timeout=10)]
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "silent"
        if error.code() is grpc.StatusCode.UNAVAILABLE and side.revive():
            return "died"
        return f"{error.code().name}"
    told = []
    for answer in answers:
        document = json_format.MessageToDict(answer)
        if document.pop("errorMessage", ""):
            document = {"error": True}
        told.append(document)
    return f"OK {json.dumps(told, sort_keys=True)}"


def _load_outcome(side: Side, name: str, configured: Configured) -> str:
    """Load a model; return the status, the state in the index, and what its metadata and one request say."""
    path = f"/v2/repository/models/{name}"
    body = b""
    if configured.sent is not None:
        body = json.dumps({"parameters": {"config": configured.sent}}).encode()
    try:
        status = side.ask("POST", f"{path}/load", body, seconds=LOAD_SECONDS)[0]
        rows = [row for row in _index(side) if row["name"] == name]
        states = sorted((row.get("version", ""), row.get("state", "")) for row in rows)
        told = f"{status} {states}"
        if status == 200:
            tensor = {"name": "IN", "datatype": "INT32", "shape": [2], "data": [1, 2]}
            parameters = {"sequence_id": 3, "sequence_start": True, "sequence_end": True}
            request = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
            config = json.loads(side.ask("GET", f"/v2/models/{name}/config")[2])
            kept = [
                config[part] for part in ("max_batch_size", "input", "parameters", "instance_group")
            ]
            asked = side.ask("POST", f"/v2/models/{name}/infer", request)[0]
            told += f" {json.dumps(kept, sort_keys=True)} {asked}"
        side.ask("POST", f"{path}/unload")
        poll(lambda: _is_unloaded(side, name), 20.0)
    except (OSError, http.client.HTTPException):
        return "silent" if side.is_running() else "died"
    return told


def _index(side: Side) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(side.ask("POST", "/v2/repository/index")[2])
    return rows


def _is_unloaded(side: Side, name: str) -> bool:
    return all(row.get("state") != "UNLOADING" for row in _index(side) if row["name"] == name)


def _write_models(repository: Path) -> None:
    for name, datatype, dims, batch in MODELS:
        (repository / name / "1").mkdir(parents=True)
        source = TOLD.replace("BATCHED", str(batch > 0))
        (repository / name / "1" / "model.py").write_text(source)
        text = BASE.format(batch=batch, type=datatype, dims=dims, more="") + CPU
        (repository / name / "config.pbtxt").write_text(text)


def _for(seeds: range, seconds: float) -> Iterator[int]:
    """Yield seeds until a time is over."""
    end = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > end:
            print(f"{len(seeds) - (seed - seeds.start)} seeds were left out: {seconds} s are over")
            return
        yield seed


def ask_requests(sides: tuple[Side, Side], seeds: Iterable[int], findings: Findings) -> None:
    """Put the requests of these seeds to both servers."""
    for seed in seeds:
        asked = random_request(seed)
        theirs, ours = (outcome(side, asked) for side in sides)
        findings.asked += 1
        if theirs != ours:
            findings.add(Difference(seed, asked.kind, asked.fault, theirs, ours))


def load_configurations(
    sides: tuple[Side, Side], repository: Path, seeds: Iterable[int], findings: Findings
) -> None:
    """Load a model in the configurations of these seeds on both servers, in each once."""
    met: set[Configured] = set()
    for seed in seeds:
        name = f"random_{seed}"
        configured = random_configuration(seed)
        findings.asked += 1
        if configured in met:
            continue
        met.add(configured)
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(TOLD.replace("BATCHED", "False"))
        (repository / name / "config.pbtxt").write_bytes(configured.file)
        theirs, ours = outcomes = [_load_outcome(side, name, configured) for side in sides]
        # A server that is started again loads all models that are there.
        shutil.rmtree(repository / name)
        for side, told in zip(sides, outcomes, strict=True):
            if told in ("died", "silent"):
                # A load that never ends keeps one of Triton's four threads for loads.
                side.restart()
        if theirs != ours:
            findings.add(Difference(seed, "load", configured.kind, theirs, ours))


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 if something differs that no row explains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True, help="folder with Triton's environment")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--configurations", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1e9, help="at most for each of the two")
    options = parser.parse_args(arguments)
    # Servers are ended then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        shutil.copytree(
            HERE / "repository", repository, ignore=shutil.ignore_patterns("__pycache__")
        )
        _write_models(repository)
        flags = ["--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false"]
        flags.append("--strict-readiness=false")
        with both(options.peer, repository, Path(folder), flags) as sides:
            try:
                seeds = range(options.seed, options.seed + options.requests)
                ask_requests(sides, _for(seeds, options.seconds), findings)
                seeds = range(options.seed, options.seed + options.configurations)
                load_configurations(sides, repository, _for(seeds, options.seconds), findings)
            finally:
                # Also of a run that is ended.
                print(findings.report(), flush=True)
    return 1 if findings.found else 0


if __name__ == "__main__":
    sys.exit(main())
