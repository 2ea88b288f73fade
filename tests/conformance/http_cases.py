"""The whole table of the HTTP probe, in the order it is run."""

from tests.conformance import (
    http_cases_binary,
    http_cases_control,
    http_cases_framing,
    http_cases_json,
    http_cases_model,
    http_cases_settings,
)
from tests.conformance.http_case import Case

CASES: tuple[Case, ...] = (
    *http_cases_control.CASES,
    *http_cases_json.CASES,
    *http_cases_binary.CASES,
    *http_cases_framing.CASES,
    *http_cases_model.CASES,
    *http_cases_settings.CASES,
)
