"""Each row of the API's tables (parts 1.0 to 1.13), and what tests it.

    python -m tests.conformance.api_rows

A row is covered by the cases of the API probe that name it, and by the tests given here. The tables are
those of Triton's Python backend: names and texts that models and clients may rely on.
"""

import re
import sys
from dataclasses import dataclass

from tests.conformance.api_run import CASES


@dataclass(frozen=True)
class Row:
    """A row: its part, its name, and tests as ``file::function`` under ``tests``."""

    part: str
    name: str
    tests: tuple[str, ...] = ()


# Tests are behind their row, or in lines of their own.
_TABLE = """\
1.0 names > unit/test_pb_utils_surface.py::test_every_name_is_there_and_listed
1.0 outside of a server > unit/test_pb_utils_surface.py::test_logs_go_to_stderr_without_a_server
1.1 TRITON_STRING_TO_NUMPY
1.1 flags
1.1 serialize_byte_tensor > unit/test_pb_utils_surface.py::test_string_serialisation_functions
1.1 deserialize_bytes_tensor
1.1 get_…_by_name
1.1 transaction policy
1.1 numbered types > unit/test_pb_utils_surface.py::test_datatype_functions
1.2 set_max_batch_size > unit/test_pb_utils_model_config.py::test_max_batch_size_only_grows
1.2 set_dynamic_batching
    unit/test_pb_utils_model_config.py::test_dynamic_batching
    process/test_conformance.py::test_models_that_do_not_load_tell_why_and_disturb_no_other
1.2 add_input, add_output: keys
    process/test_conformance.py::test_models_that_do_not_load_tell_why_and_disturb_no_other
1.2 add_input, add_output: data type
    process/test_conformance.py::test_models_that_do_not_load_tell_why_and_disturb_no_other
1.2 add_input, add_output: dims
    process/test_conformance.py::test_models_that_do_not_load_tell_why_and_disturb_no_other
1.2 add_input: optional > unit/test_pb_utils_model_config.py::test_optional
1.2 auto_complete_config: what it returns, errors
    process/test_auto_complete.py::test_a_completion_that_fails_is_told_and_leaves_nothing
1.2 set_model_transaction_policy > unit/test_pb_utils_model_config.py::test_transaction_policy
1.3 TritonError > unit/test_pb_utils_request_response.py::test_error_codes
1.3 code at the client > process/test_bad_models.py::test_errors_of_their_own
1.3 code over gRPC > process/test_api_conformance.py::test_each_code_of_a_model_has_its_grpc_status
1.3 TritonModelException
1.4 Tensor > unit/test_pb_utils_tensor.py::test_unsupported_dtypes
1.4 DLPack > unit/test_pb_utils_tensor.py::test_to_dlpack_raises_the_reference_count_by_exactly_one
1.4 BF16 > unit/test_pb_utils_tensor.py::test_bf16_needs_ml_dtypes
1.4 malformed BYTES > unit/test_pb_utils_tensor.py::test_malformed_strings_are_the_models_exception
1.5 PreferredMemory
1.5 InferenceTrace
1.6 arguments > unit/test_pb_utils_request_response.py::test_values_that_have_no_counterpart
1.6 accessors
1.6 what the called model sees
1.6 set_release_flags > process/test_rescheduling.py::test_only_iterative_models_may
1.6 exec
    process/test_bls.py::test_a_call_and_its_answer
    process/test_bls.py::test_calls_are_refused_before_and_after_execute
1.6 async_exec
1.7 InferenceResponse
1.7 outputs asked for > process/test_conformance.py::test_answers_are_those_of_triton_or_differ_with_a_reason
1.8 send > process/test_decoupled.py::test_execute_that_raises_ends_its_requests_and_closes_their_senders
1.8 of a model that is not decoupled
    process/test_decoupled.py::test_other_models_may_send_their_one_response
1.9 ResponseIterator
    process/test_bls.py::test_the_answer_of_a_cancelled_called_model_is_read
    process/test_bls.py::test_an_iterator_that_is_dropped_ends_the_call
1.10 Logger > unit/test_pb_utils_surface.py::test_logs_go_to_the_server_with_the_callers_line
1.11 MetricFamily
    process/test_custom_metrics.py::test_each_kind_is_on_the_page_as_triton_writes_it
    process/test_custom_metrics.py::test_metrics_go_with_their_family_not_with_the_object
1.11 Metric > process/test_custom_metrics.py::test_models_and_instances_share_a_metric_and_count_exactly
1.11 counter
1.11 gauge
1.11 histogram
1.12 is_model_ready
1.12 load_model, unload_model
    process/test_model_control_from_models.py::test_a_model_is_loaded_from_what_it_is_sent
    process/test_model_control_from_models.py::test_failures_have_tritons_texts
    process/test_model_control.py::test_a_slow_load_is_told_in_the_log_and_the_status_and_no_mode_refuses_control
1.13 initialize
1.13 execute of other models
    process/test_bad_models.py::test_a_models_mistake_is_reported_to_its_client
    process/test_rescheduling.py::test_a_rescheduled_request_has_no_response
1.13 execute of a decoupled model
1.13 async def execute
    process/test_decoupled.py::test_coroutines_of_a_decoupled_model_run_beside_each_other
1.13 inputs may be edited
1.13 finalize
    process/test_lifecycle.py::test_what_hangs_or_fails_at_the_end_keeps_neither_the_server_nor_other_models
1.13 is_ready
    process/test_is_ready.py::test_the_model_is_ready_when_it_says_so
    process/test_is_ready.py::test_why_it_is_not_is_in_the_log
    unit/test_ready_check.py::test_one_question_for_all_who_ask
    unit/test_ready_check.py::test_a_run_that_was_too_slow_answers_who_asks_while_it_goes_on
    process/test_is_ready.py::test_a_process_that_dies_while_it_is_asked
1.13 dead stub > process/test_supervision.py::test_a_death_fails_its_request_with_the_reason_and_is_repaired
"""
_ROW = re.compile(r"^(\S+) (.*?)(?: > (\S+))?\n((?: .*\n)*)", re.MULTILINE)
ROWS = tuple(
    Row(part, name, (*test.split(), *tests.split()))
    for part, name, test, tests in _ROW.findall(_TABLE)
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
