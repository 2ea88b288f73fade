"""Has no config.pbtxt: says itself what it is, and tells what its configuration has become."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]})
        config.add_input({"name": "SCALE", "data_type": "TYPE_FP32", "dims": [1], "optional": True})
        config.add_output({"name": "CONFIG", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": False})
        return config

    def initialize(self, args):
        self.config = json.dumps(json.loads(args["model_config"]), sort_keys=True)

    def execute(self, requests):
        responses = []
        for request in requests:
            rows = request.inputs()[0].shape()[0]
            told = np.full((rows, 1), self.config.encode(), dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("CONFIG", told)]))
        return responses
