"""The whole table of the HTTP probe, in the order it is run."""

from __future__ import annotations

import http_cases_binary
import http_cases_control
import http_cases_framing
import http_cases_json
import http_cases_model
from http_case import Case

CASES: tuple[Case, ...] = (
    *http_cases_control.CASES,
    *http_cases_json.CASES,
    *http_cases_binary.CASES,
    *http_cases_framing.CASES,
    *http_cases_model.CASES,
)
