"""Correlation ids that are strings: how long they may be over HTTP."""

import json

import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.protocol.infer_request import parse_request
from tests.unit.model_configs import model_config

MODEL = model_config("A FP32 [-1] optional: true")
LONGEST = "ä" * 64  # 128 bytes


def body(text):
    return json.dumps({"inputs": [], "parameters": {"sequence_id": text}}).encode()


def test_the_longest():
    assert parse_request(body(LONGEST), MODEL, 0).options.correlation_id == LONGEST


def test_one_byte_more():
    with pytest.raises(BridgeError, match="string correlation ID cannot be longer than 128") as e:
        parse_request(body(LONGEST + "a"), MODEL, 0)
    assert e.value.code is ErrorCode.UNSUPPORTED
