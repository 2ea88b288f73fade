"""Outcome of each model of ``load_cases`` that the peer judges otherwise, or does not report."""

import re
from typing import Any

from tests.conformance.deliberate import (
    CONFIG_REASON,
    CONFIG_STRICT,
    CONFIG_TEXT,
    LOADING_HANGS,
    NO_COMPLETION,
    NO_EXECUTE,
    ONE_VERSION_BROKEN,
    Difference,
)

LOADS = ""
NOT_TEXT = r"failed to read text proto from \S+/config\.pbtxt: "
NO_BACKEND = r"Could not determine backend for model '\w+' with no backend in model configuration: "
DIED = r"Stub process '\w+_0_0' is not healthy\. It exited .* 3\."
NOTHING_VALID = r"auto_complete_config of model '\w+' returned no valid configuration: "
NO_VERSION = r"at least one version must be available under the version policy of model '\w+': "
NO_FILE = "Failed to preinitialize Python stub: Python model file not found"

# Name: why it is judged otherwise, and our reason as a regular expression (LOADS: it serves).
OTHERWISE: dict[str, tuple[Difference, str]] = {
    "dies_at_import": (LOADING_HANGS, DIED),
    "no_model_file": (LOADING_HANGS, rf"{NO_FILE} in '\S+/1/model\.py'"),
    "config_other_file": (LOADING_HANGS, rf"{NO_FILE} in '\S+/1/other\.py'"),
    "bad;name": (LOADING_HANGS, LOADS),
    "no_version": (CONFIG_REASON, NO_VERSION),
    "version_is_a_word": (CONFIG_REASON, NO_VERSION),
    "version_padded": (CONFIG_REASON, NO_VERSION),
    "config_absent_version": (CONFIG_REASON, NO_VERSION + r".*versions found: 1; .* specific 7"),
    "config_not_text_format": (CONFIG_REASON, NOT_TEXT),
    "config_unknown_field": (CONFIG_REASON, NOT_TEXT + r'.* has no field named "unknown_field"'),
    "config_unknown_dtype": (CONFIG_REASON, NOT_TEXT + r".* no value named TYPE_INT33"),
    "config_two_schedulers": (CONFIG_REASON, NOT_TEXT),
    "config_of_another_name": (
        CONFIG_REASON,
        (
            r"unexpected directory name 'config_of_another_name' for model 'other', directory name "
            r"must equal model name"
        ),
    ),
    "config_negative_batch": (CONFIG_REASON, r"'max_batch_size' must be non-negative value for "),
    "empty_directory": (CONFIG_REASON, NO_BACKEND),
    "config_unknown_backend": (
        CONFIG_TEXT,
        r"unable to find backend library for backend 'no_such_backend' of model '\w+': .* expected ",
    ),
    "config_gpu_99": (CONFIG_TEXT, r"instance group \w+_0 .* unsupported gpu id 99\. GPUs of "),
    "config_absent_environment": (
        CONFIG_TEXT,
        r"Path /no/such/environment\.tar\.gz does not exist",
    ),
    "no_execute": (
        NO_EXECUTE,
        r"Python model \S+/1/model\.py does not implement `execute` method\.",
    ),
    "version_zero": (CONFIG_STRICT, NO_VERSION),
    "config_no_instances": (
        CONFIG_STRICT,
        r"instance group \w+ .* has count -1; expected at least 1",
    ),
    "one_version_of_two_broken": (ONE_VERSION_BROKEN, LOADS),
    "auto_complete_dies": (LOADING_HANGS, DIED),
    "auto_complete_bad_dtype": (NO_COMPLETION, NOTHING_VALID + r"data_type: .* got 'TYPE_NONE'"),
    "auto_complete_unknown_field": (
        NO_COMPLETION,
        NOTHING_VALID + r".* no field named \"no_such\"",
    ),
}

_CODE = re.compile(r"(?:Internal|Invalid argument|Unsupported): ")
_NOT_THE_MODEL = re.compile(r"  <(?:frozen importlib\.|backends>/)\S+\(\d+\): \w+\n")


def reason_of_peer(text: str) -> str:
    """Its reason as ours begins: without what ``deliberate.REASON`` and ``DEATH`` leave out."""
    return _NOT_THE_MODEL.sub("", _CODE.sub("", text, count=1))


def outcomes_of_peer(record: dict[str, Any]) -> list[tuple[str, str]]:
    """State and reason of each version, from what was recorded of one model."""
    index = record.get("index", [])
    return [(row.get("state", ""), reason_of_peer(row.get("reason", ""))) for row in index]
