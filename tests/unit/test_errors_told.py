"""Errors on their way to a client: a long text of the client's own is not sent back whole."""

import json

import pytest

from gpubridge.errors import ErrorCode, LongError, not_found
from gpubridge.protocol.grpc.infer_response import failure_frame
from gpubridge.protocol.openai import openai_failure, unknown_model
from gpubridge.protocol.status import error_body

LENGTH = 20_000_000


def over_openai(error):
    return b"".join(openai_failure(error, None)[1])


def over_http(error):
    return b"".join(error_body(error))


def over_grpc(error):
    return b"".join(failure_frame(error, "m", "", final=True))


@pytest.mark.parametrize("send", [over_http, over_openai, over_grpc])
def test_the_begin_and_the_end_are_told(send):
    error = not_found(f"no model 'a{'é' * LENGTH}z': load it")
    if send is over_openai:
        error = unknown_model(error.message)
    sent = send(error)
    assert len(sent) < 140_000
    for part in (
        "no model 'aé",
        f"... ({len(error.message) - 65536} more characters) ...",
        "z': load it",
    ):
        assert part.encode() in sent


def test_texts_of_models_are_whole():
    text = "x" * LENGTH
    error = LongError([text.encode()], [json.dumps({"error": text}).encode()], ErrorCode.INTERNAL)
    assert error.told == text
    assert len(over_http(error)) > LENGTH
    assert len(over_grpc(not_found("x" * 65536))) > 65536
