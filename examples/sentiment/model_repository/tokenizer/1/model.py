"""Pre-processing: texts become rows of token ids, padded to the longest text of their request.

Words are cut into the longest pieces that the vocabulary has, as WordPiece does: a piece that
continues a word begins with ``##``.
"""

import re
import unicodedata
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

PAD, UNKNOWN = 0, 1


class TritonPythonModel:
    def initialize(self, args):
        # The directory of this version, wherever the repository lies.
        lines = Path(__file__).with_name("vocabulary.txt").read_text(encoding="utf-8").split()
        self.ids = {piece: number for number, piece in enumerate(lines)}

    def execute(self, requests):
        return [self.tokenize(request) for request in requests]

    def tokenize(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[:, 0]
        try:
            rows = [self.pieces(text.decode()) for text in texts]
        except UnicodeDecodeError as error:
            failure = pb_utils.TritonError(
                f"TEXT: expected UTF-8, got {error}", pb_utils.TritonError.INVALID_ARG
            )
            return pb_utils.InferenceResponse(error=failure)
        ids = np.full((len(rows), max(1, *map(len, rows))), PAD, np.int32)
        for padded, row in zip(ids, rows):
            padded[: len(row)] = row
        return pb_utils.InferenceResponse([pb_utils.Tensor("IDS", ids)])

    def pieces(self, text):
        """The ids of a text."""
        plain = unicodedata.normalize("NFKD", text.lower())
        plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
        return [piece for word in re.findall(r"\w+|!", plain) for piece in self.cut(word)]

    def cut(self, word):
        """The ids of a word, longest piece first."""
        found, begin = [], 0
        while begin < len(word):
            prefix = "##" if begin else ""
            for end in range(len(word), begin, -1):
                number = self.ids.get(prefix + word[begin:end])
                if number is not None:
                    break
            else:
                return [UNKNOWN]
            found.append(number)
            begin = end
        return found
