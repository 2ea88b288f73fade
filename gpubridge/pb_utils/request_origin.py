"""What a received request is connected to, without a word about processes and sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from gpubridge.pb_utils.response_sender import InferenceResponseSender
from gpubridge.pb_utils.tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

    from gpubridge.pb_utils.output_form import OutputForm


class RequestOrigin(Protocol):
    """What a received request is connected to; given by the process around the model."""

    def cancelled(self) -> bool:
        """Tell whether the client no longer waits."""

    def output(
        self, name: str, datatype: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Tensor:
        """Make an output tensor in its final place."""

    def output_on_device(self, form: OutputForm, /) -> Tensor:
        """Make an output tensor in its final place on the instance's GPU, which it has."""

    def reschedule(self, wanted: bool, /) -> None:
        """Note whether the model wants to get the request again."""

    def response_sender(self) -> InferenceResponseSender:
        """Return the request's response sender, the same each time."""
