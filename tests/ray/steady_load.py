"""A steady load that counts every request that is not answered."""

import contextlib
import http.client
import queue
import threading
from collections import Counter

import grpc
import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from tests.process.server import wait_until
from tests.ray.local_fleets import infer_body

_SECONDS = 60
_RETRIES = (
    '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.1s", '
    '"maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}'
)


def message(model, name, array):
    """Return the bytes of a ModelInferRequest."""
    tensor = grpc_client.InferInput(
        name, list(array.shape), "FP32" if array.dtype == np.float32 else "BYTES"
    )
    tensor.set_data_from_numpy(array)
    request = grpc_client.service_pb2.ModelInferRequest(model_name=model)
    request.inputs.extend([tensor._get_tensor()])
    request.raw_input_contents.extend([tensor._get_content()])
    return request


class Load:
    """Clients that ask on kept connections until the block ends; ``lost`` has what went wrong.

    ``retries``: of the client, as a gRPC channel has them by its configuration. ``code``: what a model
    of `write_code_model` runs.
    """

    def __init__(self, fleet, protocol, *, retries=False, clients=4, code="self.said = 1"):
        self.lost = Counter()
        self.answered = 0
        self._fleet, self._retries, self._code = fleet, retries, code
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        target = {"http": self._ask_http, "grpc": self._ask_grpc, "large": self._ask_large}[
            protocol
        ]
        self._threads = [threading.Thread(target=target) for _ in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more):
        """Wait for so many more answers."""
        wanted = self.answered + more
        wait_until(lambda: self.answered >= wanted, f"{more} answers more, {self.lost}")

    def _note(self, error=None):
        with self._lock:
            if error is None:
                self.answered += 1
            else:
                self.lost[error] += 1
        if error is not None:
            self._stopped.wait(0.02)

    def _ask_http(self):
        body = infer_body(self._code)
        connection = http.client.HTTPConnection(self._fleet.http_url, timeout=_SECONDS)
        while not self._stopped.is_set():
            error = "never asked"
            for _ in range(1 + 5 * self._retries):
                try:
                    connection.request("POST", "/v2/models/m/infer", body)
                    response = connection.getresponse()
                    text = response.read()
                    error = None if response.status == 200 else f"{response.status} {text[:100]!r}"
                except (OSError, http.client.HTTPException) as failure:
                    error = repr(failure)
                    connection.close()
                if error is None:
                    break
                self._stopped.wait(0.1 * self._retries)
            self._note(error)
        connection.close()

    def _ask_grpc(self):
        code = np.array([self._code.encode()], np.object_)
        request = message("m", "IN", code).SerializeToString()
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self._retries:
            options.append(("grpc.service_config", _RETRIES))
        with grpc.insecure_channel(self._fleet.grpc_url, options=options) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            while not self._stopped.is_set():
                try:
                    call(request, timeout=_SECONDS)
                    self._note()
                except grpc.RpcError as error:
                    self._note(f"{error.code()} {error.details()}")

    def _ask_large(self):
        """Stream tensors of 600 KB; a stream that a server's end breaks is opened again."""
        values = np.arange(150_000, dtype=np.float32)
        tensor = grpc_client.InferInput("IN", [values.size], "FP32").set_data_from_numpy(values)
        tries = 0
        with grpc_client.InferenceServerClient(self._fleet.grpc_url) as client:
            while not self._stopped.is_set():
                before = self.answered
                error = self._stream(client, tensor, values)
                tries = tries + 1 if self.answered == before else 1
                if error is not None and tries > 5 * self._retries:
                    self._note(error)
                self._stopped.wait(0.1 * tries * self._retries)

    def _stream(self, client, tensor, values):
        """Ask on a stream until it breaks; returns why."""
        answers = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            while not self._stopped.is_set():
                # A stream that broke since the last answer raises; its callback has the reason.
                with contextlib.suppress(InferenceServerException):
                    client.async_stream_infer("echo", [tensor])
                result, error = answers.get(timeout=_SECONDS)
                if error is not None:
                    return str(error)
                right = np.array_equal(result.as_numpy("OUT"), values)
                self._note(None if right else "a wrong answer")
        finally:
            with contextlib.suppress(Exception):
                client.stop_stream(cancel_requests=True)
        return None
