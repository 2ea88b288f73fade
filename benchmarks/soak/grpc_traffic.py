"""Clients over gRPC: calls, streams of responses that are counted, and calls that are cancelled."""

from __future__ import annotations

import queue
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.soak.known_requests import KnownRequest, RequestSource, parsed, serialized
from benchmarks.soak.request_log import Outcome, RequestLog, SentRequest

__all__ = ["ask_over_grpc", "cancel_calls", "read_streams"]

_ANSWER_SECONDS = 60.0
_STREAM_SECONDS = 600.0
_OPEN = 4
_LONGEST = 30
_STREAM_REQUESTS = 200
_CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}


def ask_over_grpc(
    log: RequestLog,
    kind: str,
    model: str,
    source: RequestSource,
    port: int,
    running: Callable[[], bool],
) -> None:
    """Call a model, checking each answer, while ``running``."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        while running():
            request = source.ask()
            sent = log.send(kind)
            try:
                answer = stub.ModelInfer(_request(model, request), timeout=_ANSWER_SECONDS)
            except grpc.RpcError as error:
                sent.fail(str(error.details()))
                source.failed()
                continue
            (output,) = answer.outputs
            values = parsed(output.datatype, answer.raw_output_contents[0])
            if not request.is_answered(answer.id, list(output.shape), values):
                log.fault(f"{kind}: wrong answer {str(answer)[:300]}")
            sent.close(Outcome.ANSWERED)


def _request(model: str, known: KnownRequest) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, id=known.id)
    for name, datatype, values in known.inputs:
        entry = request.inputs.add(name=name, datatype=datatype, shape=values.shape)
        if known.binary:
            request.raw_input_contents.append(serialized(values))
        else:
            contents = getattr(entry.contents, _CONTENTS[datatype])
            contents.extend(values.ravel().tolist())
    for name, value in known.parameters.items():
        parameter = request.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        else:
            parameter.string_param = value
    return request


def read_streams(
    log: RequestLog, kind: str, model: str, port: int, running: Callable[[], bool]
) -> None:
    """Send numbers over streams, a few at once, and count the responses to each.

    Every second stream is cancelled with its last requests under way.
    """
    turn = 0
    while running():
        turn += 1
        _Stream(log, kind, model, port, cancelled=turn % 2 == 0).run(running)


class _Stream:
    """One stream with up to four requests under way.

    Spoken without tritonclient's stream, which hands out an error without the id of its request.
    """

    def __init__(self, log: RequestLog, kind: str, model: str, port: int, cancelled: bool) -> None:
        self._log, self._kind, self._model = log, kind, model
        self._cancelled = cancelled
        self._scale = 2 if model == "stream_chain" else 1
        self._requests: queue.Queue[Any] = queue.Queue()
        self._open: dict[str, tuple[SentRequest, int, list[float]]] = {}
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._chance = random.Random(f"{kind} {time.monotonic_ns()}")  # noqa: S311

    def run(self, running: Callable[[], bool]) -> None:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        answers: Any = stub.ModelStreamInfer(
            iter(self._requests.get, None), timeout=_STREAM_SECONDS
        )
        try:
            self._converse(answers, running)
            if self._cancelled:
                answers.cancel()
            self._requests.put(None)
            for answer in answers:
                self._take(answer)
        except grpc.RpcError as error:
            self._requests.put(None)
            if not self._cancelled or error.code() is not grpc.StatusCode.CANCELLED:
                self._log.fault(f"{self._kind}: the stream broke: {error}")
        if self._cancelled:
            for sent, _, _ in self._open.values():
                sent.close(Outcome.CANCELLED)
        self._channel.close()

    def _converse(self, answers: Iterator[Any], running: Callable[[], bool]) -> None:
        """Send requests while answers come; a stream that is not cancelled is read to its end."""
        for number in range(_STREAM_REQUESTS):
            if not running():
                break
            self._send(str(number))
            while len(self._open) >= _OPEN:
                self._take(next(answers))
        while self._open and not self._cancelled:
            self._take(next(answers))

    def _send(self, name: str) -> None:
        count = self._chance.randrange(_LONGEST)
        request = service_pb2.ModelInferRequest(model_name=self._model, id=name)
        request.inputs.add(name="COUNT", datatype="FP32", shape=[1])
        request.raw_input_contents.append(struct.pack("<f", count))
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        self._open[name] = (self._log.send(self._kind), count, [])
        self._requests.put(request)

    def _take(self, answer: Any) -> None:
        response = answer.infer_response
        if response.id not in self._open:
            text = f"{self._kind}: a response after the last one: {answer.error_message or answer}"
            self._log.fault(text)
            return
        sent, count, indices = self._open[response.id]
        if answer.error_message:
            del self._open[response.id]
            sent.fail(answer.error_message)
            return
        indices += [
            value for (value,) in struct.iter_unpack("<f", b"".join(response.raw_output_contents))
        ]
        if response.parameters["triton_final_response"].bool_param:
            del self._open[response.id]
            if indices != [self._scale * index for index in range(count)]:
                self._log.fault(f"{self._kind}: expected {count} responses, got {indices}")
            sent.close(Outcome.ANSWERED)


def cancel_calls(log: RequestLog, kind: str, port: int, running: Callable[[], bool]) -> None:
    """Make calls that take up to 60 ms, and cancel most of them at some moment."""
    chance = random.Random(kind)  # noqa: S311
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = triton.InferInput("COUNT", [1], "FP32")
    tensor.set_data_from_numpy(np.array([60], np.float32))
    while running():
        sent = log.send(kind)
        done = threading.Event()

        def finish(
            result: Any, error: Any, sent: SentRequest = sent, done: threading.Event = done
        ) -> None:
            del result
            if error is None:
                sent.close(Outcome.ANSWERED)
            elif "CANCELLED" in str(error.status()):
                sent.close(Outcome.CANCELLED)
            else:
                sent.fail(str(error.message()))
            done.set()

        call = client.async_infer("patient", [tensor], finish)
        time.sleep(chance.random() * 0.09)
        call.cancel()
        if not done.wait(_ANSWER_SECONDS):
            log.fault(f"{kind}: no answer within {_ANSWER_SECONDS:.0f} s")
    client.close()
