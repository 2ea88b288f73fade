"""Tells, as JSON text, what a request looks like from inside execute."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def describe(request):
    return {
        "parameters": json.loads(request.parameters()),
        "request_id": request.request_id(),
        "correlation_id": request.correlation_id(),
        "flags": request.flags(),
        "timeout": request.timeout(),
        "requested_output_names": sorted(request.requested_output_names()),
    }


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = json.dumps(describe(request), sort_keys=True).encode()
            view = pb_utils.Tensor("VIEW", np.array([text], dtype=np.object_))
            spare = pb_utils.Tensor("SPARE", np.zeros(1, dtype=np.int32))
            responses.append(pb_utils.InferenceResponse([view, spare]))
        return responses
