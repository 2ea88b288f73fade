"""Read-only inputs: how a model that writes to them fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpubridge.pb_utils import InferenceResponse


def tells_of_write(outcome: BaseException | Sequence[Any]) -> bool:
    """Return whether a batch failed, as it seems, by a write to an array that is read-only.

    ``outcome``: the exception of the batch, or its responses, of which some may be errors.
    """
    if isinstance(outcome, BaseException):
        # Not str(error): a method of the model could raise, too.
        return isinstance(outcome, ValueError) and any(map(_tells, outcome.args[:1]))
    return any(
        _tells(each._error.message())
        for each in outcome
        if isinstance(each, InferenceResponse) and each._error is not None
    )


def _tells(text: object) -> bool:
    return isinstance(text, str) and "read-only" in text
