"""Long documents that only the standard library reads keep no other thread from running."""

import json
import sys
import threading

import pytest

from gpubridge.protocol.fields import parse_json
from gpubridge.protocol.generate import _check_unique

FLOATS = [0.125] * 600_000
NUMBERS = [0.125, 7] * 300_000
LEAST = 20


@pytest.fixture
def turns():
    """Find, in another thread, how often that runs while this one is at a number."""
    counted = []
    ended = threading.Event()
    mine = threading.get_ident()

    def run():
        while not ended.is_set():
            name = sys._current_frames()[mine].f_code.co_name
            if name in ("_float", "_integer", "_nothing"):
                counted.append(name)

    thread = threading.Thread(target=run)
    thread.start()
    yield counted
    ended.set()
    thread.join()


def test_one_with_numbers_that_json_has_not(turns):
    parse_json(json.dumps({"IN": [*FLOATS, float("nan")]}).encode())
    assert len(turns) >= LEAST


def test_one_that_may_have_a_member_twice(turns):
    body = json.dumps({"IN": NUMBERS, "id": "IN"}).encode()
    _check_unique(body, json.loads(body), ("IN",))
    assert len(turns) >= LEAST


def test_pairs_of_surrogates_are_text():
    assert parse_json(rb'{"a": Infinity, "b": "\ud83d\ude00"}')["b"] == "\U0001f600"
