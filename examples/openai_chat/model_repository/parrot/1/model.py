"""Say the last message again, a word in each response: a chat model without a language model."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            body = json.loads(request.inputs()[0].as_numpy()[0])
            words = body["messages"][-1]["content"].split()
            said = words[: body.get("max_tokens", len(words))]
            sender = request.get_response_sender()
            for index, word in enumerate(said):
                sender.send(response("text_output", word if index == 0 else " " + word))
            rest = {
                "finish_reason": "stop" if said == words else "length",
                "usage": {"prompt_tokens": len(words), "completion_tokens": len(said)},
            }
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(response("openai_response", json.dumps(rest)), final)


def response(output, text):
    return pb_utils.InferenceResponse([pb_utils.Tensor(output, np.array([text], object))])
