"""The model of the start-up row: its config.pbtxt names no tensor, the server must ask for them."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        for name in ("INPUT0", "INPUT1"):
            auto_complete_model_config.add_input(
                {"name": name, "data_type": "TYPE_FP32", "dims": [16]}
            )
        for name in ("OUTPUT0", "OUTPUT1"):
            auto_complete_model_config.add_output(
                {"name": name, "data_type": "TYPE_FP32", "dims": [16]}
            )
        auto_complete_model_config.set_max_batch_size(0)
        return auto_complete_model_config

    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = [
                pb_utils.Tensor("OUTPUT0", left + right),
                pb_utils.Tensor("OUTPUT1", left - right),
            ]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
