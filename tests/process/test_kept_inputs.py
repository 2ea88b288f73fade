"""A model may keep its inputs for ever: they stay what they were, and the server stays whole."""

import http.client
import json
import struct

from tests.process.server import running_server, write_code_model, write_model

KEEPER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    kept = []

    def execute(self, requests):
        responses = []
        for request in requests:
            self.kept.append(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
            changed = 0
            if len(self.kept) % 500 == 0:
                changed = sum(int(array[0] != i) for i, array in enumerate(self.kept))
            out = np.array([len(self.kept), changed], dtype=np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""
REQUESTS = 5000  # more than there are tickets for memory that is lent to a stub


def test_a_model_that_keeps_every_input_gets_copies_in_time(tmp_path):
    write_model(tmp_path, "keeper", KEEPER)
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "IN",
                    "shape": [2],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": 8},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    fields = {"Inference-Header-Content-Length": str(len(header))}
    with running_server(tmp_path) as server:
        connection = http.client.HTTPConnection(server.http_url, timeout=30)
        for i in range(REQUESTS):
            body = header + struct.pack("<2f", i, i)
            connection.request("POST", "/v2/models/keeper/infer", body, fields)
            answer = connection.getresponse().read()
            assert struct.unpack("<2f", answer[-8:]) == (i + 1, 0)
        connection.close()
        assert server.log().count("it gets copies from now on") == 1


def test_a_kept_request_is_over(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path) as server:
        assert server.ask("self.kept = request; self.said = request.is_cancelled()")[1] == "False"
        assert server.ask("self.said = self.kept.is_cancelled()")[1] == "False"
        # The place where its output went may be another request's by now.
        status, error = server.ask("self.kept.output('OUT', (1,), np.float32)")
        assert status == 500
        assert "expected a request that is not answered yet" in error
