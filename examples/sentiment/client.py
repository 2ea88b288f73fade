"""Ask what texts feel like: strings in, strings out, three models in between.

python examples/sentiment/client.py --url 127.0.0.1:8000 [TEXT ...]
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tritonclient.http as triton

TEXTS = (
    "We loved the food, and the staff was wonderful!",
    "The room was dirty and the service terribly slow.",
    "The train leaves at nine.",
    "Unhappy with this book: boring, a waste.",
    "A nice café with friendly staff",
)


def classify(client, model, texts):
    """Return the label and the score of each text."""
    array = np.array([[text.encode()] for text in texts], np.object_)
    tensor = triton.InferInput("TEXT", list(array.shape), "BYTES")
    tensor.set_data_from_numpy(array)
    result = client.infer(model, [tensor])
    labels, scores = result.as_numpy("LABEL"), result.as_numpy("SCORE")
    return [(label.decode(), float(score)) for [label], [score] in zip(labels, scores, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    parser.add_argument("texts", nargs="*", default=TEXTS, metavar="TEXT")
    options = parser.parse_args()

    with triton.InferenceServerClient(options.url) as client:
        by_ensemble = classify(client, "sentiment", options.texts)
        by_calls = classify(client, "sentiment_bls", options.texts)
    for text, (label, score) in zip(options.texts, by_ensemble, strict=True):
        print(f"{label:8} {score:.2f}  {text}")
    if by_calls != by_ensemble:
        raise RuntimeError(f"expected the same of sentiment_bls, got {by_calls}")
    print("sentiment_bls says the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
