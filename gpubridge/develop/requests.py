"""A developer's inputs as a request: read, checked and laid out by what does it for clients."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpubridge.config import ModelConfig
from gpubridge.develop.given_inputs import GivenTensor
from gpubridge.host_shm import HostArena
from gpubridge.protocol.body import check_strings, pack_inputs
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.request_form import RequestForm
from gpubridge.request import InferRequest, Outcome

__all__ = ["RequestMaker"]


class RequestMaker:
    """Makes requests of the same inputs, as often as wanted.

    Parameters
    ----------
    parameters : mapping
        Of the request, as in a v2 request's JSON: ``sequence_id``, ``timeout``, the model's own.

    Raises
    ------
    BridgeError
        In Triton's words, when it is no valid request for the model.
    """

    def __init__(
        self,
        inputs: Sequence[GivenTensor],
        parameters: Mapping[str, Any],
        config: ModelConfig,
    ) -> None:
        header = {
            "inputs": [
                {
                    "name": entry.name,
                    "datatype": entry.datatype,
                    "shape": entry.shape,
                    "parameters": {"binary_data_size": len(entry.data)},
                }
                for entry in inputs
            ],
            "parameters": {"binary_data_output": True, **parameters},
        }
        self._model = config.name
        self._data = memoryview(b"".join(entry.data for entry in inputs))
        self.form: RequestForm = parse_request(json.dumps(header).encode(), config, len(self._data))

    def make(self, arena: HostArena) -> InferRequest:
        """Make a request; who submits it gives its slot away. Nobody hears of its outcome yet.

        Raises
        ------
        BridgeError
            INVALID_ARG for strings that are malformed, UNAVAILABLE when the arena is full.
        """
        form = self.form
        slot, places, copied = pack_inputs(form, self._data, arena)
        try:
            check_strings(form, self._model, [slot.memory[at : at + n] for at, n in places])
        except BaseException:
            arena.free(slot)
            raise
        request = InferRequest(
            form.signature,
            slot,
            0,
            places,
            _unheard,
            form.identifier,
            form.context,
            copied,
            form.batch_size,
            form.options,
            form.dims,
        )
        request.arrived = time.monotonic_ns()
        return request


def _unheard(_: Outcome | None) -> None:
    """Take an outcome that nobody wants."""
