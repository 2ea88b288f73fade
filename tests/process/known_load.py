"""A load of each kind of model whose figures are known: how many requests each gets, and what becomes of them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.process.ensembles import write_ensemble
from tests.process.gates import Gate
from tests.process.model_sources import answering, sending
from tests.process.server import wait_until, write_model

__all__ = ["KNOWN", "Known", "KnownLoad", "write"]


@dataclass(frozen=True)
class Known:
    """What becomes of a model's requests.

    - ``sizes``: executions, by the sum of the batch sizes of their requests.
    - ``inferences``: batch sizes of the requests that were executed and succeeded, as many as these unless given.
    - ``first``: requests with a first response that is no error, as many as succeeded unless given.
    - ``steps``: answered requests of an ensemble to each of its steps, which are all of one ``member``, and run after
      each other unless ``beside`` each other.
    - ``again``: executions after which a request comes again.
    - ``answered_errors``: errors among the responses of requests that succeeded.
    """

    success: int = 0
    sizes: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    inferences: int | None = None
    first: int | None = None
    hits: int = 0
    misses: int = 0
    restarts: int = 0
    instances: int = 1
    steps: Sequence[int] = ()
    answered_errors: int = 0
    member: str = "stage"
    beside: bool = False
    again: int = 0

    @property
    def errors(self) -> int:
        """Errors that clients got: those of failures that were not cancelled, and of `answered_errors`."""
        cancelled = self.failures.get("CANCELED", 0)
        return sum(self.failures.values()) - cancelled + self.answered_errors

    @property
    def executed(self) -> int:
        return self.success - self.hits


KNOWN = {
    "plain": Known(3, {1: 6}, {"BACKEND": 3, "OTHER": 1}),
    "batched": Known(7, {1: 2, 2: 1, 3: 2, 5: 1, 8: 1}, {"BACKEND": 1}, inferences=21),
    "two": Known(4, {1: 4}, instances=2),
    # An error among its responses is no failure: the request goes on.
    "decoupled": Known(5, {1: 5}, first=3, answered_errors=1),
    "threads": Known(3, {1: 3}),
    "direct": Known(3, {1: 3}, {"REJECTED": 1}),
    "oldest": Known(3, {1: 3}),
    # Each of its runs counts like a request.
    "iterative": Known(3, {1: 3}, first=1, again=2),
    "stage": Known(9, {1: 10}, {"BACKEND": 1}),
    "pair": Known(2, {1: 2}, {"OTHER": 1}, instances=0, steps=(3, 2)),
    "shares": Known(1, {1: 1}, instances=0, steps=(1,)),
    "cached_pair": Known(2, {1: 1}, hits=1, misses=1, instances=0, steps=(1, 1)),
    "beside": Known(1, {1: 1}, instances=0, steps=(1, 1), beside=True),
    "streams": Known(1, {1: 1}, instances=0, steps=(1,), member="decoupled"),
    "given_up": Known(failures={"CANCELED": 1}, instances=0, steps=(0,), member="cancelled"),
    "called": Known(4, {1: 5}, {"BACKEND": 1}),
    "caller": Known(2, {1: 3}, {"BACKEND": 1}),
    "cached": Known(4, {1: 3}, {"BACKEND": 1}, hits=2, misses=3),
    "timed": Known(1, {1: 1}, {"REJECTED": 1}),
    "short": Known(2, {1: 2}, {"REJECTED": 1}),
    # Nobody has the responses of those that were executed.
    "cancelled": Known(2, {1: 2}, {"CANCELED": 1}, first=0),
    "again": Known(1, {1: 1}),
    "dying": Known(2, {1: 2}, {"BACKEND": 1}, restarts=1),
    "one_file": Known(2, {1: 2}),
    "idle": Known(),
}
"""The models that are loaded in the end; ``gone`` is not."""

KEY = {"triton-grpc-protocol-my_key": "v"}
NEGATIVE, RAISES, DIES, WAITS = -1.0, -2.0, -3.0, -4.0
"""Values by which a client says what becomes of its request."""
_ANSWER = f"""
if value.flat[0] == {NEGATIVE}:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
if value.flat[0] == {RAISES}:
    raise ValueError("raised")
if value.flat[0] == {DIES}:
    os._exit(7)
if value.flat[0] == {WAITS}:
    WAIT
return respond(OUT=value + 1)
"""
_CALLS = answering("""
for _ in range(2):
    call = pb_utils.InferenceRequest(
        model_name="called", requested_output_names=["OUT"], inputs=request.inputs()
    )
    answer = call.exec()
    if answer.has_error():
        return pb_utils.InferenceResponse(error=answer.error())
return respond(OUT=value)
""")
_SENDS = f"""
if value.flat[0] == {NEGATIVE}:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
for _ in range(max(0, int(value.flat[0]))):
    send(OUT=value)
"""
# Sends what it sends after `execute` has returned.
_THREADS = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(request.inputs()[0].as_numpy().flat[0])
            threading.Thread(target=self.send, args=[request.get_response_sender(), count]).start()

    def send(self, sender, count):
        for _ in range(count):
            tensor = pb_utils.Tensor("OUT", np.ones(1, np.float32))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Has a request executed three times.
_ITERATES = sending("""
self.runs = getattr(self, "runs", 0) + 1
if self.runs < 3:
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
send(OUT=value)
""").replace("            sender.send(flags", "            if self.runs == 3: sender.send(flags")
_ONE_FILE = """
import gpubridge
import numpy as np

@gpubridge.model(inputs={"IN": np.float32}, outputs={"OUT": np.float32})
def one_file(IN):
    return IN
"""
_DECLARED = """
from gpubridge.one_file.adapter import model_class

TritonPythonModel = model_class({path!r}, "one_file")
"""
_DECOUPLED = "model_transaction_policy { decoupled: true }"
_CACHED = "response_cache { enable: true }"
_QUEUE = "dynamic_batching { default_queue_policy { %s } }"
_CONFIGS = {
    "plain": "",
    "batched": "max_batch_size: 8 dynamic_batching { }",
    "two": "instance_group { count: 2 }",
    "direct": "max_batch_size: 1 sequence_batching { }",
    "oldest": "max_batch_size: 4 sequence_batching { oldest { max_candidate_sequences: 4 } }",
    "stage": "",
    "called": "",
    "cached": _CACHED,
    "timed": "max_batch_size: 1 "
    + _QUEUE % "timeout_action: REJECT default_timeout_microseconds: 1000",
    "short": "max_batch_size: 1 " + _QUEUE % "max_queue_size: 1",
    "cancelled": "max_batch_size: 1 dynamic_batching { }",
    "again": "",
    "gone": "",
    "dying": "",
    "idle": "",
}
_STREAMED = {
    "decoupled": (3, 2, 0, NEGATIVE),
    "threads": (2, 2, 1),
    "streams": (2,),
    "iterative": (3,),
}
"""Values, which are how many responses a request gets."""
_GATED = ("batched", "timed", "short", "cancelled")


def write(repository: Path, gates: Path) -> dict[str, Gate]:
    """Write the models; returns the gates of those that have one."""
    gates.mkdir()
    made = {name: Gate(gates / name) for name in _GATED}
    waits = {
        name: f"open({gate.path + '.reached'!r}, 'w'); {gate.wait}" for name, gate in made.items()
    }
    waits["cancelled"] += "\n    while not request.is_cancelled(): os.sched_yield()"
    for name, config in _CONFIGS.items():
        source = answering(_ANSWER.replace("WAIT", waits.get(name, "pass")))
        write_model(repository, name, source, config=config)
    write_model(repository, "decoupled", sending(_SENDS), config=_DECOUPLED)
    write_model(repository, "threads", _THREADS, config=_DECOUPLED)
    iterates = "max_batch_size: 1 sequence_batching { iterative_sequence: true }"
    write_model(repository, "iterative", _ITERATES, config=_DECOUPLED + iterates)
    write_model(repository, "caller", _CALLS)
    (gates / "app.py").write_text(_ONE_FILE)
    write_model(repository, "one_file", _DECLARED.format(path=str(gates / "app.py")))
    twice = "stage IN=A > OUT=t", "stage IN=t > OUT=B"
    write_ensemble(repository, "pair", *twice)
    write_ensemble(repository, "shares", "stage IN=A > OUT=B")
    write_ensemble(repository, "cached_pair", *twice, config=_CACHED)
    beside = "stage IN=A > OUT=B", "stage IN=A > OUT=C"
    write_ensemble(repository, "beside", *beside, outputs="B C")
    write_ensemble(repository, "streams", "decoupled IN=A > OUT=B", config=_DECOUPLED)
    write_ensemble(repository, "given_up", "cancelled IN=A > OUT=B", config="max_batch_size: 1")
    return made


class KnownLoad:
    """Sends the load to a server, over gRPC; owns its client."""

    def __init__(self, server, gates: dict[str, Gate]) -> None:
        self._server = server
        self._gates = gates
        self._client = triton.InferenceServerClient(server.grpc_url)

    def close(self) -> None:
        for gate in self._gates.values():
            gate.open()
        self._client.close()

    def send(self) -> None:
        """Send all of it; the figures are those of the table once this returns."""
        self._send_plain()
        self._send_streams()
        self._send_ensembles_and_calls()
        self._send_in_batches()
        self._send_to_queues()
        self._send_around_loads()

    def ask(self, model: str, value: float, size: int = 0, **options) -> str:
        """Infer with ``size`` rows, or a vector where it is 0; return the error, or nothing."""
        try:
            self._client.infer(model, [_given(model, value, size)], headers=KEY, **options)
        except InferenceServerException as error:
            return error.message()
        return ""

    def _send_plain(self) -> None:
        for _ in range(3):
            assert self.ask("plain", 1) == ""
        for _ in range(2):
            assert "negative" in self.ask("plain", NEGATIVE)
        assert "raised" in self.ask("plain", RAISES)
        # Refused before the model has it.
        assert "unexpected shape" in self.ask("plain", 1, size=2)
        for model in ["two"] * 4 + ["one_file"] * 2:
            assert self.ask(model, 1) == ""

    def _send_streams(self) -> None:
        for model, values in _STREAMED.items():
            answers: SimpleQueue = SimpleQueue()
            self._client.start_stream(lambda result, error, a=answers: a.put(error), headers=KEY)
            for value in values:
                tensor = _given(model, value, int(model == "iterative"))
                self._client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
                for _ in range(max(0, int(value)) + 1 + (value < 0)):
                    answers.get(timeout=150)
            self._client.stop_stream()

    def _send_ensembles_and_calls(self) -> None:
        for _ in range(2):
            assert self.ask("pair", 1) == ""
            assert self.ask("caller", 1) == ""
        assert "negative" in self.ask("pair", NEGATIVE)
        assert "negative" in self.ask("caller", NEGATIVE)
        assert self.ask("shares", 1) == ""
        assert self.ask("beside", 1) == ""
        for value in (1, 1, 1, 2):
            assert self.ask("cached", value) == ""
        assert "negative" in self.ask("cached", NEGATIVE)
        for _ in range(2):
            assert self.ask("cached_pair", 1) == ""

    def _send_in_batches(self) -> None:
        for size in (1, 3, 3, 8):
            assert self.ask("batched", 1, size) == ""
        assert "negative" in self.ask("batched", NEGATIVE, 2)
        # While one is executed, two become a batch.
        assert self._behind_one("batched", [2, 3]) == ["", ""]
        for model in ("direct", "oldest"):
            for at in range(3):
                flags = {"sequence_start": not at, "sequence_end": at == 2}
                assert self.ask(model, 1, 1, sequence_id=7, **flags) == ""
        # That sequence has not begun.
        assert "START" in self.ask("direct", 1, 1, sequence_id=8)

    def _send_to_queues(self) -> None:
        (error,) = self._behind_one("timed", [1], until=lambda sent: sent[0].done())
        assert "timeout" in error.lower()
        # The second is one too many: the other is queued.
        errors = self._behind_one("short", [1, 1], until=lambda sent: any(s.done() for s in sent))
        assert sorted(map(bool, errors)) == [False, True]
        self._cancel()

    def _cancel(self) -> None:
        """Have a client give up a request that is queued, those that are executed, and one of an ensemble."""
        ended: SimpleQueue = SimpleQueue()
        reached = Path(f"{self._gates['cancelled'].path}.reached")
        self._gates["cancelled"].open()
        for models in (("cancelled", "cancelled"), ("given_up",)):
            calls = [
                self._client.async_infer(
                    model, [_given(model, value, 1)],
                    lambda result, error: ended.put(error), headers=KEY,
                )
                for model, value in zip(models, (WAITS, 1), strict=False)
            ]  # fmt: skip
            wait_until(reached.exists, "the first request", self._server)
            self._wait_for_queue("cancelled", len(calls) - 1)
            reached.unlink()
            for call in reversed(calls):
                call.cancel()
                assert "cancel" in ended.get(timeout=150).message().lower()
                self._wait_for_queue("cancelled", 0)

    def _behind_one(
        self, model: str, sizes: list[int], until: Callable[[list[Future]], bool] | None = None
    ) -> list[str]:
        """Send requests while another one is executed, which ends once ``until`` holds, or they wait."""
        with ThreadPoolExecutor(8) as threads:
            first = threads.submit(self.ask, model, WAITS, 1)
            reached = Path(f"{self._gates[model].path}.reached")
            wait_until(reached.exists, f"the first request of {model}", self._server)
            sent = [threads.submit(self.ask, model, 1, size) for size in sizes]
            if until is None:
                self._wait_for_queue(model, len(sizes))
            else:
                wait_until(lambda: until(sent), f"the end of requests of {model}", self._server)
            self._gates[model].open()
            assert first.result() == ""
            return [each.result() for each in sent]

    def _wait_for_queue(self, model: str, number: int) -> None:
        name = f'nv_inference_pending_request_count{{model="{model}",version="1"}}'
        wait_until(lambda: self._server.metrics()[name] == number, "queued requests", self._server)

    def _send_around_loads(self) -> None:
        for model in ("again", "again", "gone", "dying"):
            assert self.ask(model, 1) == ""
        for model in ("again", "gone"):
            self._client.unload_model(model)
            wait_until(lambda m=model: not self._client.is_model_ready(m), "its end", self._server)
        self._client.load_model("again")
        assert self.ask("again", 1) == ""
        self._let_die()

    def _let_die(self) -> None:
        """Ask a model whose process dies of it, and its next process."""
        assert self.ask("dying", DIES)
        wait_until(lambda: self._client.is_model_ready("dying"), "its process", self._server)
        assert self.ask("dying", 1) == ""


def _given(model: str, value: float, size: int) -> triton.InferInput:
    name = "A" if KNOWN.get(model, Known()).steps else "IN"
    data = np.full([size, 4] if size else [4], value, np.float32)
    return triton.InferInput(name, data.shape, "FP32").set_data_from_numpy(data)
