"""Sources of models that answer each request for itself, without the lines that all of them have."""

import textwrap

_SOURCE = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils


def respond(parameters=None, **outputs):
    tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items()]
    return pb_utils.InferenceResponse(tensors, parameters=parameters)


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
{initialize}

{execute}
{answer}
"""
_ANSWERING = """
    def execute(self, requests):
        return [self.answer(request, request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, request, value):
"""
_SENDING = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            send = lambda **outputs: sender.send(respond(**outputs))
            self.answer(request, request.inputs()[0].as_numpy(), sender, send)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, request, value, sender, send):
"""


def answering(answer: str, initialize: str = "") -> str:
    """Return the source of a model.

    ``answer`` is the code that returns the response of a ``request``, of whose first input it has the
    ``value``; ``respond(OUT=array)`` makes one.
    """
    return _source(_ANSWERING, answer, initialize)


def sending(answer: str) -> str:
    """Return the source of a decoupled model; ``send(OUT=array)`` sends one response of many, by ``sender``."""
    return _source(_SENDING, answer, "")


def _source(execute: str, answer: str, initialize: str) -> str:
    return _SOURCE.format(
        initialize=textwrap.indent(initialize, " " * 8),
        execute=execute,
        answer=textwrap.indent(answer, " " * 8),
    )
