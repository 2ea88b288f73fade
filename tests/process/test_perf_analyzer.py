"""perf_analyzer in its modes; skipped where it is neither on PATH nor where ``GPUBRIDGE_PEER`` names."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.process.flag_sets import named_and_traced
from tests.process.foreign import run, tool, write_add_sub
from tests.process.model_sources import answering, sending
from tests.process.server import running_server, write_model

RUNNING_SUM = answering(
    """
value, start, end, ready, corrid = (tensor.as_numpy() for tensor in request.inputs())
key = int(corrid.flat[0])
if ready.flat[0]:
    before = 0 if start.flat[0] else self.sums[key]
    self.sums[key] = np.int32((int(before) + int(value.flat[0])) % 1000)
return respond(TOTAL=np.full(value.shape, self.sums.get(key, 0), np.int32))
""",
    "self.sums = {}",
)
TWICE = sending("send(OUT=value); send(OUT=value)")
SEQUENCES = """
max_batch_size: 4
sequence_batching {
  control_input [
    { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
    { name: "END" control [{ kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] }] },
    { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] }] },
    { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }
  ]
}
"""

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def server(repository):
    write_add_sub(repository)
    write_model(
        repository,
        "running_sum",
        RUNNING_SUM,
        config=SEQUENCES,
        tensors="VALUE INT32 [1] > TOTAL INT32 [1]",
    )
    decoupled, vectors = (
        "model_transaction_policy { decoupled: true }",
        "IN FP32 [16] > OUT FP32 [16]",
    )
    write_model(repository, "twice", TWICE, config=decoupled, tensors=vectors)
    with running_server(repository, *named_and_traced()) as running:
        yield running


def perf_analyzer() -> tuple[str, dict[str, str]]:
    peer = os.environ.get("GPUBRIDGE_PEER")
    if peer and (path := Path(peer) / "perf_analyzer").exists():
        return str(path), {"LD_LIBRARY_PATH": str(Path(peer) / "lib")}
    return tool("perf_analyzer"), {}


MODES = {
    "http": "-i http",
    "http, asynchronous": "-i http --async",
    "grpc": "-i grpc",
    "grpc, asynchronous": "-i grpc --async",
    "grpc, streaming": "-i grpc --async --streaming",
    "grpc, gzip": "-i grpc --grpc-compression-algorithm gzip",
}
LOADS = {
    "concurrency": "-m add_sub --concurrency-range 1:3",
    "rate": "-m add_sub --request-rate-range 200:300:100",
    "intervals": "-m add_sub --request-intervals INTERVALS",
    "sequences": "-m running_sum --concurrency-range 5 --sequence-length 6",
    "sequences by rate": "-m running_sum --request-rate-range 100 --num-of-sequences 6 "
    "--sequence-length 4 --sequence-id-range 100:5000",
}


# Not with --input-tensor-format=json: it then sends one value for a tensor of any shape, and Triton
# refuses that, too.
OTHERS = {
    "values with expected answers": "-m add_sub --input-data VALUES",
    "values with expected answers, rate": "-m add_sub --input-data VALUES --request-rate-range 100",
    "shared memory": "-m add_sub --shared-memory system --concurrency-range 2",
    "shared memory, rate": "-m add_sub --shared-memory system --request-rate-range 100 "
    "--output-shared-memory-size 4096",
    "poisson": "-m add_sub --request-rate-range 400 --request-distribution poisson",
    "metrics": "-m add_sub --collect-metrics --metrics-url METRICS",
    "count": "-m add_sub --request-count 20",
    "search": "-m add_sub --concurrency-range 1:4 --latency-threshold 500 --binary-search",
    "traces": "-m add_sub --trace-level TIMESTAMPS --trace-rate 10",
}
OF_HTTP = {"answers as JSON": "-m add_sub --output-tensor-format json"}
OF_GRPC = {
    "parameters": "-m add_sub --request-parameter x:1:int",
    "deflate": "-m add_sub --grpc-compression-algorithm deflate",
    "stream, shared memory": "-m add_sub --async --streaming --shared-memory system",
    "stream, decoupled": "-m twice --async --streaming --concurrency-range 2",
}


@pytest.mark.parametrize(
    ("protocol", "flags"),
    [
        pytest.param(protocol, flags, id=f"{protocol}, {name}")
        for protocol, own in (("http", OF_HTTP), ("grpc", OF_GRPC))
        for name, flags in {**OTHERS, **own}.items()
    ],
)
def test_perf_analyzer_with_other_flags(server, tmp_path, protocol, flags):
    values = tmp_path / "values"
    ramp, ones = [float(n) for n in range(16)], [1.0] * 16
    answer = {"SUM": [n + 1 for n in ramp], "DIFFERENCE": [n - 1 for n in ramp]}
    values.write_text(json.dumps({"data": [{"A": ramp, "B": ones}], "validation_data": [answer]}))
    flags = flags.replace("VALUES", str(values)).replace("METRICS", f"{server.metrics_url}/metrics")
    measure(server, protocol, flags.split())


def test_perf_analyzer_with_periods(server, tmp_path):
    profile = tmp_path / "profile"
    path, environment = perf_analyzer()
    run(
        path, "-i", "grpc", "-u", server.grpc_url, "-m", "twice", "--async", "--streaming",
        "--periodic-concurrency-range", "1:3:1", "--request-period", "2",
        "--profile-export-file", profile, **environment,
    )  # fmt: skip
    (experiment,) = json.loads(profile.read_text())["experiments"]
    assert len(experiment["requests"]) >= 3
    for request in experiment["requests"]:
        assert len(request["response_timestamps"]) >= 2


# One load is enough for gzip.
@pytest.mark.parametrize(
    ("mode", "load"),
    [(m, load) for m in MODES for load in LOADS if "gzip" not in m or load == "concurrency"],
)
def test_perf_analyzer(server, tmp_path, mode, load):
    intervals = tmp_path / "intervals"
    intervals.write_text("5000\n10000\n")
    flags = f"{MODES[mode]} {LOADS[load]}".replace("INTERVALS", str(intervals)).split()
    measure(server, flags[1], flags[2:])


def measure(server, protocol, flags):
    """Run perf_analyzer; it must get answers throughout."""
    path, environment = perf_analyzer()
    url = server.http_url if protocol == "http" else server.grpc_url
    # It measures until it is sure; this makes it sure at once.
    said = run(
        path, "-i", protocol, "-u", url, *flags, "--measurement-interval", "200",
        "--stability-percentage", "99999", "--max-trials", "12", **environment,
    )  # fmt: skip
    rates = [float(rate) for rate in re.findall(r"throughput: ([0-9.]+) infer/sec", said)]
    assert rates, said
    assert min(rates) > 0, said
