"""Checks what ``execute`` returned: a list of responses, or nothing for those that senders answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpubridge.pb_utils import InferenceResponse
from gpubridge.stub.response_encoder import ContractError, ModelIdentity
from gpubridge.stub.response_stream import RequestHandle


def checked_answers(
    identity: ModelIdentity, returned: Any, handles: Sequence[RequestHandle]
) -> list[Any]:
    """Return the response of each request; None where its sender answers it, or has.

    Senders may be taken later, from any thread, by a model that keeps the request. Raises ContractError.
    """
    if identity.decoupled:
        if returned is not None:
            raise not_none(identity)
        return [None] * len(handles)
    if not isinstance(returned, list):
        error = ContractError(
            f"Expected a list in the execute return, found type '{type(returned)}'."
        )
        if returned is not None:
            raise error
        for handle in handles:
            handle.unanswered = error
        return [None] * len(handles)
    # The list is the model's, which may change it at any time.
    responses = list.copy(returned)
    if len(responses) != len(handles):
        raise ContractError(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{len(handles)}, and InferenceResponse(s) size "
            f"is:{len(responses)}\n"
        )
    for response, handle in zip(responses, handles):
        _check(response, handle)
    # A response that was sent by the sender takes precedence.
    return [
        response if response is not None and handle.close_unless_sent() else None
        for response, handle in zip(responses, handles)
    ]


def not_none(identity: ModelIdentity) -> ContractError:
    """Return the error of a decoupled model that returned something."""
    return ContractError(
        f"Python model '{identity.instance}' is using the decoupled mode and the execute function "
        "must return None."
    )


def _check(response: Any, handle: RequestHandle) -> None:
    if handle.rescheduled:
        if response is not None:
            raise ContractError(
                "Expected a None object in the execute function return list for reschduled "
                f"request, found type '{type(response)}'."
            )
    elif not isinstance(response, InferenceResponse):
        error = ContractError(
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            f"'{type(response)}'."
        )
        if response is not None:
            raise error
        handle.unanswered = error
