"""Load generators behind one call: wrk, else Triton's perf_analyzer, else plain Python."""

from __future__ import annotations

import csv
import json
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from benchmarks.payloads import Payload
from benchmarks.peer import Peer
from benchmarks.plain_load import send_requests
from gpubridge.errors import BridgeError

_SCRIPT = Path(__file__).resolve().parent / "infer.lua"
# wrk keeps a latency table as long as this timeout; no single request comes near it.
_REQUEST_SECONDS = 10


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One generator run; ``failed`` counts socket errors and answers other than success."""

    requests: int
    requests_per_second: float
    p50_us: float
    p99_us: float
    mean_us: float
    failed: int


class LoadGenerator(Protocol):
    """Sends one payload over and over on a number of connections."""

    @property
    def name(self) -> str: ...

    def run(self, payload: Payload, port: int, connections: int, seconds: int) -> LoadFigures: ...


class Wrk:
    """wrk with one thread; the body goes to it by file."""

    def __init__(self, program: str) -> None:
        self._program = program
        shown = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stdout
        self.name = shown.split(" Copyright")[0].strip()

    def run(self, payload: Payload, port: int, connections: int, seconds: int) -> LoadFigures:
        with tempfile.NamedTemporaryFile(prefix="gpubridge-bench-") as body:
            body.write(payload.body())
            body.flush()
            command = [self._program, "-t1", f"-c{connections}", f"-d{seconds}s"]
            command += ["--timeout", f"{_REQUEST_SECONDS}s", "-s", str(_SCRIPT)]
            command += [f"http://127.0.0.1:{port}{payload.path}"]
            command += ["--", body.name, str(len(payload.header()))]
            output = _output_of(command, dict(os.environ), seconds)
        result = json.loads(output.rpartition("RESULT ")[2])
        return LoadFigures(
            requests=result["requests"],
            requests_per_second=result["requests"] / result["duration_us"] * 1e6,
            p50_us=result["p50_us"],
            p99_us=result["p99_us"],
            mean_us=result["mean_us"],
            failed=result["failed"],
        )


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """Triton's perf_analyzer; it fills tensors of the payload's shape itself.

    With ``shared_memory`` the tensors lie in regions of system shared memory, both ways.
    """

    program: Path
    libraries: Path
    protocol: str = "http"
    shared_memory: bool = False

    name: ClassVar[str] = "perf_analyzer"
    _WINDOWS: ClassVar[int] = 3

    def run(self, payload: Payload, port: int, connections: int, seconds: int) -> LoadFigures:
        window_ms = max(seconds * 1000 // self._WINDOWS, 200)
        command = [str(self.program), "-m", payload.model, "-i", self.protocol]
        command += ["-u", f"127.0.0.1:{port}", "--concurrency-range", str(connections)]
        command += ["--measurement-interval", str(window_ms), "--max-trials", str(self._WINDOWS)]
        # Every window counts: the rounds of the benchmark are what shows instability.
        command += ["--stability-percentage", "999"]
        if self.shared_memory:
            largest = max(len(tensor.data) for tensor in payload.outputs)
            command += ["--shared-memory", "system", "--output-shared-memory-size", str(largest)]
        for tensor in payload.inputs:
            shape = tensor.shape[payload.batch_dims :]
            command += ["--shape", f"{tensor.name}:{','.join(map(str, shape))}"]
            if tensor.datatype == "BYTES":
                mean = len(tensor.data) // tensor.shape[0] - 4
                command += ["--string-length", str(mean)]
        with tempfile.TemporaryDirectory(prefix="gpubridge-bench-") as folder:
            report = Path(folder) / "report.csv"
            environment = {**os.environ, "LD_LIBRARY_PATH": str(self.libraries)}
            _output_of([*command, "-f", str(report)], environment, seconds)
            with report.open() as lines:
                row = next(csv.DictReader(lines))
        rate = float(row["Inferences/Second"])
        return LoadFigures(
            requests=round(rate * window_ms * self._WINDOWS / 1000),
            requests_per_second=rate,
            p50_us=float(row["p50 latency"]),
            p99_us=float(row["p99 latency"]),
            # By Little's law: the report has no mean.
            mean_us=connections / rate * 1e6,
            failed=0,  # perf_analyzer ends with an error at the first failed request
        )


class H2Load:
    """nghttp2's h2load with one thread: the lightest client of gRPC; the message goes to it by file.

    It knows nothing of gRPC, so a call that fails looks like one that does not: the statistics of
    the server have to say how many there were. A decoupled model is asked through a stream of its own
    for each request.
    """

    name = "h2load"
    _SERVICE = "/inference.GRPCInferenceService"

    def __init__(self, program: str) -> None:
        self._program = program

    def run(self, payload: Payload, port: int, connections: int, seconds: int) -> LoadFigures:
        method = f"{self._SERVICE}/{'ModelStreamInfer' if payload.responses else 'ModelInfer'}"
        with tempfile.TemporaryDirectory(prefix="gpubridge-bench-") as folder:
            body, log = Path(folder) / "body", Path(folder) / "log"
            message = payload.message()
            body.write_bytes(struct.pack(">BI", 0, len(message)) + message)
            command = [self._program, "-t1", f"-c{connections}", "-m1", f"-D{seconds}"]
            command += ["-d", str(body), f"--log-file={log}"]
            command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
            command += [f"http://127.0.0.1:{port}{method}"]
            _output_of(command, dict(os.environ), seconds)
            # A line per request: its start, the status, the µs it took.
            lines = np.loadtxt(log, dtype=np.int64, ndmin=2)
        latencies, good = lines[:, 2], int((lines[:, 1] == 200).sum())
        if not latencies.size:
            raise BridgeError(f"h2load: no request to {method} was answered in {seconds} s")
        p50, p99 = np.percentile(latencies, (50, 99))
        return LoadFigures(
            requests=good,
            requests_per_second=good / seconds,
            p50_us=float(p50),
            p99_us=float(p99),
            mean_us=float(latencies.mean()),
            failed=latencies.size - good,
        )


class PlainPython:
    """Threads of this process: slower than a fast server, so ratios come out too small."""

    name = "plain Python threads (limits small requests)"

    def run(self, payload: Payload, port: int, connections: int, seconds: int) -> LoadFigures:
        latencies, failed, elapsed = send_requests(payload, port, connections, seconds)
        if not latencies:
            raise BridgeError(f"no request to {payload.path} succeeded in {seconds} s")
        latencies.sort()
        count = len(latencies)
        return LoadFigures(
            requests=count,
            requests_per_second=count / elapsed,
            p50_us=latencies[count // 2] * 1e6,
            p99_us=latencies[min(count - 1, count * 99 // 100)] * 1e6,
            mean_us=sum(latencies) / count * 1e6,
            failed=failed,
        )


def choose_generator(peer: Peer | None, wanted: str = "auto") -> LoadGenerator:
    """Return the best generator there is, or the wanted one.

    Raises
    ------
    BridgeError
        If the wanted one is not installed.
    """
    program = shutil.which("wrk")
    analyzer = choose_analyzer(peer)
    if program and wanted in ("auto", "wrk"):
        return Wrk(program)
    if analyzer and wanted in ("auto", "perf_analyzer"):
        return analyzer
    if wanted in ("auto", "plain"):
        return PlainPython()
    raise BridgeError(
        f"load generator {wanted}: not found (wrk on PATH, perf_analyzer in the peer's folder)"
    )


def choose_h2load() -> H2Load | None:
    """Return h2load, if it is on PATH."""
    program = shutil.which("h2load")
    return None if program is None else H2Load(program)


def choose_analyzer(peer: Peer | None) -> PerfAnalyzer | None:
    """Return the peer's perf_analyzer, if there is one: it knows gRPC and shared memory."""
    if peer is None or peer.perf_analyzer is None:
        return None
    return PerfAnalyzer(peer.perf_analyzer, peer.perf_analyzer_libraries)


def _output_of(command: list[str], environment: dict[str, str], seconds: int) -> str:
    """Run a generator to its end and return what it printed."""
    program = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=4 * seconds + 60,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BridgeError(
            f"{program}: did not end within {error.timeout} s; is the server hanging?"
        ) from error
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()[-600:]
        raise BridgeError(f"{program}: exit code {done.returncode}: {text}")
    return done.stdout
