"""A model with half a config.pbtxt: it adds a tensor each way and batching, by its own parameter."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        dims = [int(config["parameters"]["DIMS"]["string_value"])]
        fields = {"data_type": "TYPE_FP32", "dims": dims}
        auto_complete_model_config.add_input({"name": "VALUES", **fields})
        auto_complete_model_config.add_output({"name": "SQUARES", **fields})
        auto_complete_model_config.set_max_batch_size(8)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "VALUES").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("SQUARES", np.square(values))])
