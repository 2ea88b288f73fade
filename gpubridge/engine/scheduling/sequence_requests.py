"""Fields that sequence batching adds to requests, and the stub's settings for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpubridge.config import ModelConfig
from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.sequence_settings import SequenceBatching, parse_sequence_batching
from gpubridge.request import InferRequest, Outcome
from gpubridge.transport.context import correlated
from gpubridge.transport.stub_settings import StateSettings

_START = 1
_END = 2
_STATE_FOLDER = "initial_state"


def state_settings(settings: SequenceBatching, directory: Path) -> list[StateSettings]:
    """Return the stub's settings for the states of sequences.

    ``directory``: the model's directory, whose folder ``initial_state`` has the initial values.
    """
    return [
        StateSettings(
            state.input_name,
            state.output_name,
            state.datatype,
            state.dims,
            state.same_buffer,
            state.initial.dims if state.initial else (),
            str(directory / _STATE_FOLDER / state.initial.data_file)
            if state.initial and state.initial.data_file
            else "",
        )
        for state in settings.states
    ]


def sequence_batching(config: ModelConfig) -> SequenceBatching | None:
    """Return the settings of a model's sequence batching, if it has that."""
    message = config.message
    if message.WhichOneof("scheduling_choice") != "sequence_batching":
        return None
    return parse_sequence_batching(config.name, message.sequence_batching)


class SequenceRequests:
    """Builds the requests of the items that a sequence batcher returns."""

    def __init__(self, config: ModelConfig) -> None:
        settings = sequence_batching(config)
        assert settings is not None
        self._stateful = bool(settings.states)
        self.iterative = settings.iterative

    def of(self, item: SequenceItem) -> InferRequest:
        """Return the request of an item, with control tensors and state fields."""
        request: InferRequest = item.request
        if item.pattern is not None:
            # Padding: inputs of the same form; the outcome is ignored.
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
            added["state"] = [item.slot, item.start]
        if self.iterative:
            # The scheduler may have assigned the id, and cleared START of a rescheduled request.
            added.update(correlated(item.correlation_id))
            added["flags"] = item.start * _START + item.end * _END
        request.context = request.context.changed(**added)
        return request


def _ignore(_: Outcome | None) -> None:
    """Ignore the outcome."""
