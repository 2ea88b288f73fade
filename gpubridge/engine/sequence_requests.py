"""Data that sequence batching adds to requests for a stub, and announces to the stub first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpubridge.config import ModelConfig
from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.sequence_settings import SequenceBatching, parse_sequence_batching
from gpubridge.request import InferRequest, Outcome
from gpubridge.transport.context import correlated

_START = 1
_END = 2
_STATE_FOLDER = "initial_state"


def sequence_stub_settings(config: ModelConfig, directory: Path) -> dict[str, Any]:
    """Return the fields of the INITIALIZE message about sequences.

    ``directory``: the model's; files with initial values lie in its folder ``initial_state``.
    """
    settings = _settings(config) or SequenceBatching()
    return {
        "iterative": settings.iterative,
        "batched": config.max_batch_size > 0,
        "states": [
            {
                "input_name": state.input_name,
                "output_name": state.output_name,
                "datatype": state.datatype,
                "dims": state.dims,
                "same_buffer": state.same_buffer,
                "initial_dims": state.initial.dims if state.initial else (),
                "initial_file": str(directory / _STATE_FOLDER / state.initial.data_file)
                if state.initial and state.initial.data_file
                else "",
            }
            for state in settings.states
        ],
    }


def _settings(config: ModelConfig) -> SequenceBatching | None:
    message = config.message
    if message.WhichOneof("scheduling_choice") != "sequence_batching":
        return None
    return parse_sequence_batching(config.name, message.sequence_batching)


class SequenceRequests:
    """Makes requests of what a sequence batcher gives out."""

    def __init__(self, config: ModelConfig) -> None:
        settings = _settings(config)
        assert settings is not None
        self._stateful = bool(settings.states)
        self.iterative = settings.iterative

    def of(self, item: SequenceItem) -> InferRequest:
        """Return the request of an item, with what the model gets to know beside it."""
        request: InferRequest = item.request
        if item.pattern is not None:
            # A place in the batch that no request fills: inputs of the same form, an outcome for
            # nobody.
            pattern: InferRequest = item.pattern.request
            request = InferRequest(
                pattern.signature,
                None,
                0,
                pattern.places,
                _ignore,
                batch_size=0,
                dims=pattern.dims,
            )
            request.pattern = pattern
            request.item = item
        if not (item.controls or self._stateful or self.iterative):
            return request
        added: dict[str, Any] = {}
        if item.controls:
            added["controls"] = [
                (control.name, control.datatype, control.shape, control.value)
                for control in item.controls
            ]
        if self._stateful and item.pattern is None:
            added["state_slot"] = item.slot
            added["state_starts"] = item.start
        if self.iterative:
            # The scheduler may have chosen the id, and what comes back starts no sequence again.
            added.update(correlated(item.correlation_id))
            added["flags"] = item.start * _START + item.end * _END
        request.context = request.context.changed(**added)
        return request


def _ignore(_: Outcome | None) -> None:
    """Ignore the outcome."""
