"""Models of Triton's Python backend, one class for each work."""

import numpy as np
import triton_python_backend_utils as pb_utils


def single(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


class AddSub:
    def execute(self, requests):
        responses = []
        for request in requests:
            outputs = add_sub(single(request, "INPUT0"), single(request, "INPUT1"))  # noqa: F821
            tensors = [
                pb_utils.Tensor(f"OUTPUT{index}", each) for index, each in enumerate(outputs)
            ]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses


class Means:
    def execute(self, requests):
        responses = []
        for request in requests:
            output = means(single(request, "IMAGE")[0])  # noqa: F821
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("MEANS", output)]))
        return responses


class Tokens:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for token in tokens(single(request, "text_input")[0].decode()):  # noqa: F821
                output = pb_utils.Tensor("text_output", np.array([token.encode()], np.object_))
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
