"""Ask a model that counts words, and read its counters from the metrics page.

python examples/custom_metrics/client.py --url 127.0.0.1:8000 --metrics-url 127.0.0.1:8002
"""

from __future__ import annotations

import argparse
import sys
import urllib.request

import numpy as np
import tritonclient.http as triton


def lengths(client, text):
    """Return the length of each word of a text."""
    words = np.array([word.encode() for word in text.split()], np.object_)
    tensor = triton.InferInput("WORDS", list(words.shape), "BYTES")
    tensor.set_data_from_numpy(words)
    return client.infer("custom_metrics", [tensor]).as_numpy("LENGTHS").tolist()


def metrics(url):
    """Return the model's own lines of the metrics page."""
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sorted(line for line in lines if line.startswith("example_"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    parser.add_argument(
        "--metrics-url", default="127.0.0.1:8002", help="HOST:PORT of the metrics page"
    )
    options = parser.parse_args()

    with triton.InferenceServerClient(options.url) as client:
        for text in ("to be or not to be", "that is the question"):
            print(f"{text}: {lengths(client, text)}")
            for line in metrics(options.metrics_url):
                name, _, value = line.rpartition(" ")
                print(f"  {name.partition('{')[0]} {float(value):.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
