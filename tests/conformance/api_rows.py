"""Each row of the API's tables (parts 1.0 to 1.13), and what tests it.

    python -m tests.conformance.api_rows

A row is covered by the cases of the API probe that name it, and by the tests given here. The tables are
those of Triton's Python backend: names and texts that models and clients may rely on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tests.conformance.api_run import CASES

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """A row: its part, its name, and tests as ``file::function`` under ``tests``."""

    part: str
    name: str
    tests: tuple[str, ...] = ()


def _row(part: str, name: str, *tests: str) -> Row:
    return Row(part, name, tests)


_PB = "unit/test_pb_utils_"
_CONFIG = f"{_PB}model_config.py::"
_BLS = "process/test_bls.py::"
_READY = "process/test_is_ready.py::"
_METRICS = "process/test_custom_metrics.py::"
_CONTROL = "process/test_model_control_from_models.py::"
_DECOUPLED = "process/test_decoupled.py::"
_SUPERVISION = "process/test_supervision.py::"
_BAD = "process/test_bad_models.py::"
_LOADS = "process/test_conformance.py::test_models_that_do_not_load_tell_why_and_disturb_no_other"

ROWS = (
    _row("1.0", "names", f"{_PB}surface.py::test_every_name_is_there_and_listed"),
    _row(
        "1.0", "outside of a server", f"{_PB}surface.py::test_a_model_is_testable_without_a_server"
    ),
    _row("1.1", "TRITON_STRING_TO_NUMPY"),
    _row("1.1", "flags"),
    _row("1.1", "serialize_byte_tensor", f"{_PB}surface.py::test_string_serialisation_functions"),
    _row("1.1", "deserialize_bytes_tensor"),
    _row("1.1", "get_…_by_name"),
    _row("1.1", "transaction policy"),
    _row("1.1", "numbered types", f"{_PB}surface.py::test_datatype_functions"),
    _row("1.2", "set_max_batch_size", f"{_CONFIG}test_max_batch_size_only_grows"),
    _row("1.2", "set_dynamic_batching", f"{_CONFIG}test_dynamic_batching", _LOADS),
    _row("1.2", "add_input, add_output: keys", _LOADS),
    _row("1.2", "add_input, add_output: data type", _LOADS),
    _row("1.2", "add_input, add_output: dims", _LOADS),
    _row("1.2", "add_input: optional", f"{_CONFIG}test_optional"),
    _row(
        "1.2",
        "auto_complete_config: what it returns, errors",
        "process/test_auto_complete.py::test_a_completion_that_fails_is_told_and_leaves_nothing",
    ),
    _row("1.2", "set_model_transaction_policy", f"{_CONFIG}test_transaction_policy"),
    _row("1.3", "TritonError", f"{_PB}request_response.py::test_error_codes"),
    _row("1.3", "code at the client", f"{_BAD}test_errors_of_their_own"),
    _row(
        "1.3",
        "code over gRPC",
        "process/test_api_conformance.py::test_each_code_of_a_model_has_its_grpc_status",
    ),
    _row("1.3", "TritonModelException"),
    _row("1.4", "Tensor", f"{_PB}tensor.py::test_unsupported_dtypes"),
    _row(
        "1.4", "DLPack", f"{_PB}tensor.py::test_to_dlpack_raises_the_reference_count_by_exactly_one"
    ),
    _row("1.4", "BF16", f"{_PB}tensor.py::test_bf16_needs_ml_dtypes"),
    _row(
        "1.4", "malformed BYTES", f"{_PB}tensor.py::test_malformed_strings_are_the_models_exception"
    ),
    _row("1.5", "PreferredMemory"),
    _row("1.5", "InferenceTrace"),
    _row("1.6", "arguments", f"{_PB}request_response.py::test_values_that_have_no_counterpart"),
    _row("1.6", "accessors"),
    _row("1.6", "what the called model sees", f"{_BLS}test_all_fields_of_a_call_arrive"),
    _row(
        "1.6", "set_release_flags", "process/test_rescheduling.py::test_only_iterative_models_may"
    ),
    _row(
        "1.6",
        "exec",
        f"{_BLS}test_a_call_and_its_answer",
        f"{_BLS}test_calls_are_refused_before_and_after_execute",
    ),
    _row("1.6", "async_exec", f"{_BLS}test_coroutines_call_at_once"),
    _row("1.7", "InferenceResponse"),
    _row("1.7", "outputs asked for", f"{_BAD}test_mistakes_that_triton_accepts_are_accepted"),
    _row(
        "1.8",
        "send",
        f"{_DECOUPLED}test_execute_that_raises_ends_its_requests_and_closes_their_senders",
    ),
    _row(
        "1.8",
        "of a model that is not decoupled",
        f"{_DECOUPLED}test_other_models_may_send_their_one_response",
    ),
    _row(
        "1.9",
        "ResponseIterator",
        f"{_BLS}test_an_iterator_begins_again_and_says_when_it_is_done",
        f"{_BLS}test_the_answer_of_a_cancelled_called_model_is_read",
        f"{_BLS}test_an_iterator_that_is_dropped_ends_the_call",
    ),
    _row("1.10", "Logger", f"{_PB}surface.py::test_logs_go_to_the_server_with_the_callers_line"),
    _row(
        "1.11",
        "MetricFamily",
        f"{_METRICS}test_each_kind_is_on_the_page_as_triton_writes_it",
        f"{_METRICS}test_metrics_go_with_their_family_not_with_the_object",
    ),
    _row("1.11", "Metric", f"{_METRICS}test_models_and_instances_share_a_metric_and_count_exactly"),
    _row("1.11", "counter"),
    _row("1.11", "gauge"),
    _row("1.11", "histogram"),
    _row("1.12", "is_model_ready"),
    _row(
        "1.12",
        "load_model, unload_model",
        f"{_CONTROL}test_a_model_is_loaded_from_what_it_is_sent",
        f"{_CONTROL}test_failures_have_tritons_texts",
        "process/test_model_control.py::test_a_slow_load_is_told_in_the_log_and_the_status_and_no_mode_refuses_control",
    ),
    _row("1.13", "initialize"),
    _row(
        "1.13",
        "execute of other models",
        f"{_BAD}test_a_models_mistake_is_reported_to_its_client",
        "process/test_rescheduling.py::test_a_rescheduled_request_has_no_response",
    ),
    _row("1.13", "execute of a decoupled model"),
    _row(
        "1.13",
        "async def execute",
        f"{_DECOUPLED}test_coroutines_of_a_decoupled_model_run_beside_each_other",
    ),
    _row("1.13", "inputs may be edited"),
    _row(
        "1.13",
        "finalize",
        "process/test_lifecycle.py::test_what_hangs_or_fails_at_the_end_keeps_neither_the_server_nor_other_models",
    ),
    _row(
        "1.13",
        "is_ready",
        f"{_READY}test_the_model_is_ready_when_it_says_so",
        f"{_READY}test_why_it_is_not_is_in_the_log",
        f"{_READY}test_concurrent_readiness_checks_share_one_run",
        f"{_READY}test_a_model_that_does_not_answer_is_not_ready",
        f"{_READY}test_a_process_that_dies_while_it_is_asked",
    ),
    _row(
        "1.13",
        "dead stub",
        f"{_SUPERVISION}test_a_death_fails_its_request_with_the_reason_and_is_repaired",
    ),
)


def table() -> str:
    """Return a line for each row: how many cases of the probe, and which tests."""
    lines = []
    for row in ROWS:
        count = sum(case.part == row.part and case.row == row.name for case in CASES)
        lines.append(f"{row.part:5} {row.name:34} {count:3} cases  {' '.join(row.tests)}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
