"""Runs the requests of a batch together if their inputs can be joined, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from gpubridge.backends.model_setup import ModelSetup
from gpubridge.tensor.datatypes import DATATYPES


class UnusableInput(Exception):
    """A request's inputs cannot be used by the program, for the reason in the message."""


def texts_of(name: str, array: Any, library: str) -> list[str]:
    """Return the strings of an input; UnusableInput for bytes that are not UTF-8."""
    try:
        return [item.decode() for item in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise UnusableInput(
            f"input '{name}': expected strings in UTF-8, {library}, got {error.object[:32]!r}"
        ) from error


def object_array(items: Sequence[object], shape: Sequence[int]) -> npt.NDArray[np.object_]:
    """Return an array of Python objects."""
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array.reshape(shape)


class Program(Protocol):
    """A model's file loaded by a library, whose arrays are sliced along the first dimension."""

    def take(self, tensor: pb_utils.Tensor) -> Any:
        """Return a request's input as an array of the library, or raise UnusableInput."""

    def join(self, arrays: Sequence[Any]) -> Any:
        """Return the concatenation of arrays along their first dimension."""

    def run(self, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        """Return the requested outputs, by name; UnusableInput if the inputs do not fit."""

    def keep(self, array: Any) -> Any:
        """Return an output that later runs do not change: itself, or a copy."""

    def give(self, name: str, array: Any) -> pb_utils.Tensor:
        """Return an array of the library as an output."""


class BatchRunner:
    """Answers requests with a program's outputs."""

    def __init__(self, setup: ModelSetup, program: Program) -> None:
        self._program = program
        self._batched = setup.max_batch_size > 0
        self._types = {
            output.name: output.data_type for output in (*setup.outputs, *setup.state_outputs)
        }
        self._states = [output.name for output in setup.state_outputs]

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Return one response per request; a failure affects only its own request."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[object, list[int]] = {}
        inputs: list[dict[str, Any]] = []
        for i, request in enumerate(requests):
            inputs.append({})
            try:
                inputs[i] = {each.name(): self._program.take(each) for each in request.inputs()}
            except UnusableInput as error:
                responses[i] = _refusal(error)
                continue
            alone = not (self._batched and inputs[i])
            groups.setdefault(i if alone else self._form(request), []).append(i)
        for members in groups.values():
            self._answer(requests, inputs, members, responses, keep=len(groups) > 1)
        return responses

    def _form(self, request: pb_utils.InferenceRequest) -> object:
        """Return the properties that requests must share to run together."""
        return tuple(
            sorted(
                (each.name(), each.triton_dtype(), *each.shape()[1:]) for each in request.inputs()
            )
        )

    def _answer(
        self,
        requests: Sequence[pb_utils.InferenceRequest],
        inputs: Sequence[dict[str, Any]],
        members: Sequence[int],
        responses: list[Any],
        keep: bool,
    ) -> None:
        """Run requests as one; ``keep``: others are run before the responses are sent."""
        wanted = [self._wanted(requests[i]) for i in members]
        sizes = [self._size(requests[i]) for i in members]
        try:
            answers = self._run([inputs[i] for i in members], sizes, wanted, keep)
        except Exception as error:  # noqa: BLE001  (the library's, of any type)
            if len(members) == 1:
                responses[members[0]] = _refusal(error)
                return
            # One of them caused it: run each alone.
            for i in members:
                self._answer(requests, inputs, [i], responses, keep=True)
            return
        for i, answer in zip(members, answers):
            responses[i] = pb_utils.InferenceResponse(answer)

    def _size(self, request: pb_utils.InferenceRequest) -> int:
        """Return a request's number of batch elements; 0 if it has no inputs, or no batch dimension."""
        inputs = request.inputs() if self._batched else []
        return int(inputs[0].shape()[0]) if inputs else 0

    def _wanted(self, request: pb_utils.InferenceRequest) -> list[str]:
        asked = request.requested_output_names()
        return [name for name in self._types if name in asked or name in self._states]

    def _run(
        self,
        inputs: Sequence[dict[str, Any]],
        sizes: Sequence[int],
        wanted: Sequence[Sequence[str]],
        keep: bool,
    ) -> list[list[pb_utils.Tensor]]:
        joined = inputs[0]
        if len(inputs) > 1:
            joined = {name: self._program.join([one[name] for one in inputs]) for name in joined}
        names = [name for name in self._types if any(name in each for each in wanted)]
        outputs = self._program.run(joined, names) if names else {}
        if keep:
            outputs = {name: self._program.keep(array) for name, array in outputs.items()}
        answers = []
        begin = 0
        for size, asked in zip(sizes, wanted):
            end = begin + size
            answers.append(
                [self._output(name, outputs[name], begin, end, sum(sizes)) for name in asked]
            )
            begin = end
        return answers

    def _output(self, name: str, array: Any, begin: int, end: int, total: int) -> pb_utils.Tensor:
        """Return one request's part of an output."""
        if total:
            shape = tuple(array.shape)
            if not shape or shape[0] != total:
                raise ValueError(
                    f"output '{name}': expected a first dimension of {total}, the batch, got "
                    f"the shape {list(shape)}; without a batch dimension, set max_batch_size: 0"
                )
            if (begin, end) != (0, total):
                array = array[begin:end]
        tensor = self._program.give(name, array)
        expected = self._types[name]
        if tensor.triton_dtype() != _number(expected):
            got = next(
                key for key, value in DATATYPES.items() if value.number == tensor.triton_dtype()
            )
            raise ValueError(
                f"output '{name}': expected {expected}, as config.pbtxt says, got TYPE_{got}"
            )
        return tensor


def _number(data_type: str) -> int:
    name = data_type.replace("TYPE_", "")
    return DATATYPES["BYTES" if name == "STRING" else name].number


def _refusal(error: Exception) -> pb_utils.InferenceResponse:
    code = pb_utils.TritonError.INTERNAL
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UnusableInput):
        code, text = pb_utils.TritonError.INVALID_ARG, str(error)
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(text, code))
