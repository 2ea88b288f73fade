"""Ask two models that send any number of responses, over a gRPC stream.

python examples/decoupled/client.py --url 127.0.0.1:8001
"""

from __future__ import annotations

import argparse
import queue
import sys

import numpy as np
import tritonclient.grpc as triton

TIMEOUT_S = 60


class Stream:
    """A gRPC stream; hands out the responses in the order in which they come."""

    def __init__(self, url: str) -> None:
        self.received: queue.Queue = queue.Queue()
        self.client = triton.InferenceServerClient(url)
        self.client.start_stream(lambda result, error: self.received.put((result, error)))

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_) -> None:
        self.client.stop_stream()
        self.client.close()

    def ask(self, model, request_id, **arrays):
        """Send a request; ``enable_empty_final_response`` asks to be told of its end."""
        inputs = []
        for name, array in arrays.items():
            kind = {"int32": "INT32", "uint32": "UINT32"}[str(array.dtype)]
            tensor = triton.InferInput(name, list(array.shape), kind)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        self.client.async_stream_infer(
            model, inputs, request_id=request_id, enable_empty_final_response=True
        )

    def take(self):
        """Return the id, the result and whether it is the last, or raise the error that came."""
        result, error = self.received.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error
        response = result.get_response()
        return response.id, result, response.parameters["triton_final_response"].bool_param


def repeat(stream):
    """Two requests at once: the answers to the second overtake those to the first."""
    for request_id, delay_ms in (("slow", 300), ("fast", 20)):
        elements = np.array([4, 2, 0, 1], np.int32)
        stream.ask(
            "repeat",
            request_id,
            IN=elements,
            DELAY_MS=np.full(elements.shape, delay_ms, np.uint32),
            WAIT_MS=np.array([0], np.uint32),
        )
    answers = {"slow": [], "fast": []}
    ended = []
    while len(ended) < len(answers):
        request_id, result, last = stream.take()
        if result.as_numpy("OUT") is not None:
            answers[request_id].append(int(result.as_numpy("OUT")[0]))
        if last:
            ended.append(request_id)
    for request_id in ended:
        print(f"repeat {request_id}: {answers[request_id]}")


def square(stream):
    for number in (3, 1, 0):
        stream.ask("square", str(number), IN=np.array([number], np.int32))
        answers, last = [], False
        while not last:
            _, result, last = stream.take()
            if result.as_numpy("OUT") is not None:
                answers.append(int(result.as_numpy("OUT")[0]))
        print(f"square {number}: {answers}")
    stream.ask("square", "negative", IN=np.array([-1], np.int32))
    try:
        stream.take()
    except triton.InferenceServerException as error:
        print(f"square -1: {error.message()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8001", help="HOST:PORT of the gRPC endpoint")
    options = parser.parse_args()
    with Stream(options.url) as stream:
        repeat(stream)
        square(stream)
    return 0


if __name__ == "__main__":
    sys.exit(main())
