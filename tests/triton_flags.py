"""The flags of tritonserver, by the headings of its help."""

_NAMES_OF_2_51 = """
id exit-timeout-secs
log-verbose log-info log-warning log-error log-format log-file
model-store model-repository exit-on-error disable-auto-complete-config strict-readiness
model-control-mode repository-poll-secs load-model model-config-name model-load-thread-count
model-load-retry-count model-namespacing enable-peer-access
allow-http http-address http-port reuse-http-port http-header-forward-pattern http-thread-count
http-restricted-api
allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern
grpc-infer-allocation-pool-size grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert
grpc-server-key grpc-root-cert grpc-infer-response-compression-level grpc-keepalive-time
grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes
grpc-max-connection-age grpc-max-connection-age-grace grpc-restricted-protocol
allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count
allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model
allow-metrics allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port
metrics-interval-ms metrics-config
trace-config
backend-directory backend-config
repoagent-directory
cache-config cache-directory
rate-limit rate-limit-resource
pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit
strict-model-config response-cache-byte-size trace-file trace-level trace-rate trace-count
trace-log-frequency
"""
TRITON_2_51 = tuple(f"--{name}" for name in _NAMES_OF_2_51.split())
"""Flags that ``tritonserver --help`` of 2.51 lists."""

NEWER = (
    "--allow-client-shm",
    "--grpc-infer-thread-count",
    "--grpc-max-response-pool-size",
    "--http-max-input-size",
)
"""Flags that the documentation of later releases adds."""
