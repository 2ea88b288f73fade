"""Sum and difference of two tensors: the smallest model with two inputs and two outputs."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "OUTPUT0")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        pb_utils.Logger.log_info(f"{args['model_instance_name']} answers {self.dtype.__name__}")

    def execute(self, requests):
        # A batch is a list of requests, each with tensors of its own: they are not concatenated.
        return [self.add_sub(request) for request in requests]

    def add_sub(self, request):
        minuend = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        subtrahend = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("OUTPUT0", (minuend + subtrahend).astype(self.dtype)),
                pb_utils.Tensor("OUTPUT1", (minuend - subtrahend).astype(self.dtype)),
            ]
        )

    def finalize(self):
        pb_utils.Logger.log_info("add_sub is done")
