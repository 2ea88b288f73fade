"""Names of the server's own families of metrics, which models may not use for theirs."""

from __future__ import annotations

OWN_FAMILIES = frozenset(
    (
        "gpubridge_access_log_dropped_total",
        "gpubridge_answer_duration_us_total",
        "gpubridge_batch_size",
        "gpubridge_copied_bytes_total",
        "gpubridge_copies_total",
        "gpubridge_device_arenas",
        "gpubridge_device_events_used",
        "gpubridge_device_waits_total",
        "gpubridge_fallbacks_total",
        "gpubridge_grpc_requests_total",
        "gpubridge_http_requests_total",
        "gpubridge_model_state",
        "gpubridge_open_requests",
        "gpubridge_queued_requests",
        "gpubridge_request_duration_seconds",
        "gpubridge_stub_restarts_total",
        "nv_cache_hit_duration_per_model",
        "nv_cache_miss_duration_per_model",
        "nv_cache_num_hits_per_model",
        "nv_cache_num_misses_per_model",
        "nv_cpu_memory_total_bytes",
        "nv_cpu_memory_used_bytes",
        "nv_cpu_utilization",
        "nv_energy_consumption",
        "nv_gpu_memory_total_bytes",
        "nv_gpu_memory_used_bytes",
        "nv_gpu_power_limit",
        "nv_gpu_power_usage",
        "nv_gpu_utilization",
        "nv_inference_compute_infer_duration_us",
        "nv_inference_compute_infer_summary_us",
        "nv_inference_compute_input_duration_us",
        "nv_inference_compute_input_summary_us",
        "nv_inference_compute_output_duration_us",
        "nv_inference_compute_output_summary_us",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_first_response_histogram_ms",
        "nv_inference_pending_request_count",
        "nv_inference_queue_duration_us",
        "nv_inference_queue_summary_us",
        "nv_inference_request_duration_us",
        "nv_inference_request_failure",
        "nv_inference_request_success",
        "nv_inference_request_summary_us",
        # Triton's that are not served.
        "nv_inference_load_ratio",
        "nv_pinned_memory_pool_total_bytes",
        "nv_pinned_memory_pool_used_bytes",
    )
)
_PARTS = ("_bucket", "_sum", "_count")


def is_own(name: str) -> bool:
    """Return whether a name is that of a family of the server, or may be that of a part of one."""
    return name in OWN_FAMILIES or any(name.removesuffix(part) in OWN_FAMILIES for part in _PARTS)
