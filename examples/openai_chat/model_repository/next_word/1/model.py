"""Continue a rhyme from the last word of a prompt.

Nothing here is OpenAI's: by the names of its tensors the model serves /v1/completions and, as with
Triton, /v2/models/next_word/generate.
"""

import numpy as np
import triton_python_backend_utils as pb_utils

RHYME = "row row row your boat gently down the stream merrily merrily life is but a dream"


class TritonPythonModel:
    def initialize(self, args):
        self.words = RHYME.split()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        limit = pb_utils.get_input_tensor_by_name(request, "max_tokens")
        last = prompt.split()[-1:]
        begin = self.words.index(last[0]) + 1 if last and last[0] in self.words else 0
        words = self.words[begin:][: 4 if limit is None else int(limit.as_numpy()[0])]
        text = np.array([" " + " ".join(words)], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
