"""HTTP cases of models: versions, decoupled models, and every way of misbehaving."""

from typing import Any

from tests.conformance import deliberate as why
from tests.conformance.deliberate import Difference
from tests.conformance.http_case import Case, encode, get, infer, post, sent, tensor

LISTED_IN_MODEL = (
    "none raise_value_error raise_model_exception raise_not_ascii raise_quotes raise_empty"
    " raise_unprintable return_empty_list return_two_responses return_string return_integer"
    " return_list_of_integers return_tuple return_bare_response no_outputs missing_output"
    " unknown_output duplicate_output wrong_dtype wrong_dims wrong_rank empty_tensor scalar_tensor"
    " nan_and_infinity error_default error_with_outputs error_empty bad_dtype_tensor"
    " nameless_tensor raise_system_exit raise_keyboard_interrupt unheard_of"
)
CODES = "UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED"


def misbehave(mode: str, **fields: Any) -> Case:
    document = {"inputs": [tensor("MODE", "BYTES", [1], [mode])]}
    return infer(f"model: {mode}", "misbehaving", document, **fields)


def version(name: str, path: str) -> Case:
    body = encode({"inputs": [tensor("INPUT", "INT32", [1], [0])]})
    return post(f"version: {name}", f"/v2/models/{path}/infer", body)


def count(number: int) -> bytes:
    return encode({"inputs": [tensor("COUNT", "INT32", [1], [number])]})


def of_misbehaving(
    name: str, mode: str, *, differs: Difference | None = None, **keys: object
) -> Case:
    document = {"inputs": [tensor("MODE", "BYTES", [1], [mode])], **keys}
    return infer(f"model: {name}", "misbehaving", document, differs=differs)


MISBEHAVING = [
    *(misbehave(mode) for mode in LISTED_IN_MODEL.split()),
    *(misbehave(f"error_code_{code}") for code in CODES.split()),
    misbehave("bad_output_list", differs=why.CONSTRUCTOR_TEXT),
    misbehave("return_generator", differs=why.GENERATOR),
    misbehave("return_none", patience=1.5, differs=why.NO_ANSWER),
    misbehave("return_none_item", patience=1.5, differs=why.NO_ANSWER),
    of_misbehaving("asked output not returned", "missing_output", outputs=[{"name": "EXTRA"}]),
    of_misbehaving(
        "one of two asked outputs returned",
        "missing_output",
        outputs=[{"name": "EXTRA"}, {"name": "OUT"}],
    ),
    of_misbehaving("error with id", "error_default", id="r1"),
    of_misbehaving(
        "binary output of wrong dims", "wrong_dims", parameters={"binary_data_output": True}
    ),
    of_misbehaving(
        "binary output of no outputs", "no_outputs", parameters={"binary_data_output": True}
    ),
    of_misbehaving(
        "classification of too many",
        "none",
        outputs=[{"name": "OUT", "parameters": {"classification": 9}}],
    ),
    of_misbehaving("still well after all the faults", "none"),
]

VERSIONS = [
    version("default of all is the highest", "versions_all"),
    version("1 of all", "versions_all/versions/1"),
    version("3 of all", "versions_all/versions/3"),
    version("2 of all", "versions_all/versions/2"),
    version("default of latest", "versions_latest"),
    version("1 of latest", "versions_latest/versions/1"),
    version("default of specific", "versions_specific"),
    version("3 of specific", "versions_specific/versions/3"),
]

DECOUPLED = [
    *(
        post(f"decoupled: infer with {n} responses", "/v2/models/decoupled/infer", count(n))
        for n in (0, 1, 2)
    ),
    post("decoupled: infer not JSON", "/v2/models/decoupled/infer", b"junk"),
    post(
        "generate: one response",
        "/v2/models/decoupled/generate",
        b'{"COUNT":1}',
        differs=why.GENERATE_LENGTH,
    ),
    post(
        "generate: two responses",
        "/v2/models/decoupled/generate",
        b'{"COUNT":2}',
        differs=why.GENERATE_COUNT,
    ),
    post("generate: stream", "/v2/models/decoupled/generate_stream", b'{"COUNT":2}'),
    post("generate: missing inputs", "/v2/models/add_sub/generate", b'{"a":1}'),
]

COMPLETED = [
    *(
        get(f"completed: {what} of {model}", f"/v2/models/{model}{path}")
        for model in ("completed", "completed_partly")
        for what, path in (("config", "/config"), ("metadata", ""), ("state", "/ready"))
    ),
    sent("completed: what the model is told", "completed", tensor("IN", "INT32", [2, 1], [1, 2])),
    sent(
        "completed: beyond the batch size",
        "completed",
        tensor("IN", "INT32", [9, 1], list(range(9))),
    ),
    sent("completed: other datatype", "completed", tensor("IN", "FP32", [1, 1], [1])),
    sent(
        "completed partly: batch of four",
        "completed_partly",
        tensor("IN", "INT32", [4, 2, 2], list(range(16))),
    ),
]

CASES: list[Case] = [*VERSIONS, *COMPLETED, *DECOUPLED, *MISBEHAVING]
