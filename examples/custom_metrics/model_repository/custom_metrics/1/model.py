"""Counts and measures what it does, on the server's metrics page.

A family is one name on that page; each of its metrics is a line with labels of its own. The page has
them for as long as the model holds them.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self.words_family = pb_utils.MetricFamily(
            name="example_words",
            description="Number of words seen",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self.words = self.words_family.Metric(labels=labels)
        self.longest_family = pb_utils.MetricFamily(
            name="example_longest_word",
            description="Characters of the longest word of the last request",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self.longest = self.longest_family.Metric(labels=labels)

    def execute(self, requests):
        responses = []
        for request in requests:
            words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
            lengths = np.array([len(word.decode()) for word in words], np.int32)
            self.words.increment(len(words))
            self.longest.set(float(lengths.max(initial=0)))
            pb_utils.Logger.log_verbose(f"{self.words.value():.0f} words so far")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("LENGTHS", lengths)]))
        return responses
