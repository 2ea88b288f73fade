"""Answers of the API to a model, compared with those recorded of Triton 2.51; each row has a test."""

import ast
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.conformance.api_differences import DIFFERENCES
from tests.conformance.api_rows import ROWS
from tests.conformance.api_run import CASES, collect, faults, recorded
from tests.process.server import running_server

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS / "conformance" / "api_repository"


STATUSES = {
    "UNKNOWN": "UNKNOWN",
    "INTERNAL": "INTERNAL",
    "NOT_FOUND": "NOT_FOUND",
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "CANCELLED": "CANCELLED",
}


@pytest.fixture(scope="module")
def server():
    with running_server(REPOSITORY, own=True) as running:
        yield running


@pytest.fixture(scope="module")
def answers(server):
    stubs = server.stubs()
    answers = collect(server.http_url)
    assert server.stubs() == stubs
    assert server.log().count("from the API probe") >= 5
    return answers


def test_a_model_meets_what_it_meets_in_triton_or_a_difference_with_a_reason(answers):
    assert faults(answers, recorded()) == []


def test_a_difference_without_a_reason_is_found_and_so_is_a_reason_without_one(answers):
    same, other = CASES[0].key, next(iter(DIFFERENCES[0].answers))
    assert [text.split("\n")[0] for text in faults({**answers, same: "?"}, recorded())] == [same]
    assert [
        text.split("\n")[0] for text in faults({**answers, other: recorded()[other]}, recorded())
    ] == [other]


@pytest.mark.parametrize("code", STATUSES)
def test_each_code_of_a_model_has_its_grpc_status(server, code):
    triton = pytest.importorskip("tritonclient.grpc")
    asked = f"answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('t', pb_utils.TritonError.{code}))"
    tensor = triton.InferInput("CODE", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([asked], np.object_))
    with (
        triton.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException) as failed,
    ):
        client.infer("api", [tensor])
    assert failed.value.status() == f"StatusCode.{STATUSES[code]}"
    assert failed.value.message() == "t"


def test_every_case_was_asked_of_triton_and_has_a_row():
    keys = [case.key for case in CASES]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(recorded())
    assert {(case.part, case.row) for case in CASES} <= {(row.part, row.name) for row in ROWS}


def functions_of(path):
    """Names of the functions of a file of tests."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.part} {row.name}")
def test_every_row_has_a_test(row):
    for test in row.tests:
        path, _, function = test.partition("::")
        assert function in functions_of(path), test
    assert row.tests or any((case.part, case.row) == (row.part, row.name) for case in CASES)
