"""Sort texts by topics of one's own: texts in, for each the nearest topic out.

python examples/text_topics/client.py --url 127.0.0.1:8000 [--topic TOPIC ...] [TEXT ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tritonclient.http as triton

MODEL = "text_topics"
TOPICS = ["sport", "politics", "science", "food", "weather"]
TEXTS = [
    "The striker scored twice in the second half.",
    "Parliament voted on the new budget last night.",
    "Astronomers found water vapour on a distant planet.",
    "Bake the bread for forty minutes until the crust is brown.",
    "Heavy rain and strong winds are expected tomorrow.",
]


class Match(NamedTuple):
    """The topic nearest to a text; similarity is the cosine of the angle between the two."""

    topic: str
    similarity: float


def text_input(name: str, texts: Sequence[str]) -> triton.InferInput:
    elements = np.array([[text.encode()] for text in texts], np.object_)
    tensor = triton.InferInput(name, list(elements.shape), "BYTES")
    tensor.set_data_from_numpy(elements)
    return tensor


def nearest_topics(
    client: triton.InferenceServerClient, texts: Sequence[str], topics: Sequence[str]
) -> list[Match]:
    """Return the nearest of the topics for each text, by one request."""
    result = client.infer(MODEL, [text_input("TEXT", texts), text_input("TOPIC", topics)])
    names, similarity = result.as_numpy("NEAREST"), result.as_numpy("SIMILARITY")
    best = similarity.max(axis=1)
    return [Match(name.decode(), float(one)) for name, one in zip(names, best, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", default=TEXTS, metavar="TEXT")
    parser.add_argument("--topic", action="append", help="a topic to choose from; may be repeated")
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    options = parser.parse_args()
    topics = options.topic or TOPICS
    with triton.InferenceServerClient(options.url) as client:
        matches = nearest_topics(client, options.texts, topics)
    widest = max(map(len, topics))
    for text, match in zip(options.texts, matches, strict=True):
        print(f"{match.topic:{widest}} {match.similarity:.2f}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
