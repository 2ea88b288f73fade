"""The work of ``add_sub`` on plain Ray Serve: as little as can be, of the request's bytes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

# Serve's proxy pickles messages, which name the file that they were generated from.
sys.modules["grpc_service_pb2"] = service_pb2
add_servicer = service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server


class Plain:
    """A replica that knows no protocol but that of its transport."""

    async def __call__(self, request: Any) -> Any:
        """Answer a request over HTTP, whose last bytes are the two tensors."""
        from starlette.responses import Response  # noqa: PLC0415  (of Ray Serve)

        body = await request.body()
        left, right = np.frombuffer(body[-128:], np.float32).reshape(2, 16)
        return Response((left + right).tobytes() + (left - right).tobytes())

    async def ModelInfer(self, request: Any) -> Any:  # noqa: N802  (the method's name)
        """Answer a call."""
        left, right = (np.frombuffer(data, np.float32) for data in request.raw_input_contents)
        outputs = [(left + right).tobytes(), (left - right).tobytes()]
        return service_pb2.ModelInferResponse(model_name="add_sub", raw_output_contents=outputs)


def start(http_port: int, grpc_port: int) -> None:
    """Start Serve with one replica, and wait until it answers; settings are Serve's own."""
    from ray import serve  # noqa: PLC0415  (reads the environment)

    serve.start(
        http_options={"host": "127.0.0.1", "port": http_port},
        grpc_options={"port": grpc_port, "grpc_servicer_functions": [f"{__name__}.add_servicer"]},
    )
    options = {"num_replicas": 1, "max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0}}
    serve.run(serve.deployment(**options)(Plain).bind(), route_prefix="/")
