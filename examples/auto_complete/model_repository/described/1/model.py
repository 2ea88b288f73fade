"""A model without config.pbtxt: it says itself what it takes and gives."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        for name in ("INPUT0", "INPUT1"):
            auto_complete_model_config.add_input(
                {"name": name, "data_type": "TYPE_FP32", "dims": [4]}
            )
        for name in ("OUTPUT0", "OUTPUT1"):
            auto_complete_model_config.add_output(
                {"name": name, "data_type": "TYPE_FP32", "dims": [4]}
            )
        # 0: a request is a batch by itself, and its tensors have no batch dimension.
        auto_complete_model_config.set_max_batch_size(0)
        return auto_complete_model_config

    def execute(self, requests):
        responses = []
        for request in requests:
            minuend = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            subtrahend = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("OUTPUT0", minuend + subtrahend),
                        pb_utils.Tensor("OUTPUT1", minuend - subtrahend),
                    ]
                )
            )
        return responses
