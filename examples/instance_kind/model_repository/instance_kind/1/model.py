"""Say which instance this is, and on which device it should work."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.instance = args["model_instance_name"]
        kind = args["model_instance_kind"]
        if kind == "GPU":
            self.device = f"cuda:{args['model_instance_device_id']}"
        elif kind == "MODEL":
            # KIND_MODEL leaves the choice to the model, for example of several GPUs at once.
            self.device = "whatever this model takes"
        else:
            self.device = "cpu"

    def execute(self, requests):
        responses = []
        for request in requests:
            wait_ms = pb_utils.get_input_tensor_by_name(request, "WAIT_MS").as_numpy()
            time.sleep(wait_ms[0] / 1000)
            responses.append(
                pb_utils.InferenceResponse(
                    [text("INSTANCE", self.instance), text("DEVICE", self.device)]
                )
            )
        return responses


def text(name, value):
    return pb_utils.Tensor(name, np.array([value], np.object_))
