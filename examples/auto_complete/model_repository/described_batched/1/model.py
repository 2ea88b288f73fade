"""A model with half a config.pbtxt: it adds inputs, outputs and batching, by its own parameter."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        dims = [int(config["parameters"]["DIMS"]["string_value"])]
        for name in ("INPUT0", "INPUT1"):
            auto_complete_model_config.add_input(
                {"name": name, "data_type": "TYPE_FP32", "dims": dims}
            )
        for name in ("OUTPUT0", "OUTPUT1"):
            auto_complete_model_config.add_output(
                {"name": name, "data_type": "TYPE_FP32", "dims": dims}
            )
        auto_complete_model_config.set_max_batch_size(8)
        auto_complete_model_config.set_dynamic_batching()
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
