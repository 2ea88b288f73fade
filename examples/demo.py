"""Show a running server at work: its examples, their speed, labels, an error, and a picture.

python examples/demo.py --url 127.0.0.1:8000 --output DIR
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tritonclient.http as triton
from image_preproc import classify, client as image_preproc
from pytorch_addsub import client as pytorch_addsub
from tritonclient.utils import InferenceServerException

ADD_SUB_REQUESTS = 1000
PHOTO_ROUNDS = 8


class Row(NamedTuple):
    """One line of the table of speeds."""

    model: str
    connections: int
    latencies_s: list[float]
    wall_s: float


def wait_until_ready(client: triton.InferenceServerClient, timeout_s: float) -> None:
    """Return when the server is ready.

    Raises
    ------
    TimeoutError
        It was not within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if client.is_server_ready():
                return
        except OSError:
            pass  # it does not listen yet
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"expected a ready server within {timeout_s:.0f} s, got none; is --url right?"
            )
        time.sleep(0.1)


def list_models(client: triton.InferenceServerClient) -> None:
    """Print every model of the repository with its inputs and outputs."""
    server = client.get_server_metadata()
    print(f"{server['name']} {server['version']} serves:")
    for model in client.get_model_repository_index():
        print(f"  {model['name']} version {model.get('version', '-')} {model.get('state', '')}")
        if model.get("state") == "READY":
            metadata = client.get_model_metadata(model["name"])
            for direction in ("inputs", "outputs"):
                for tensor in metadata[direction]:
                    shape = [int(size) for size in tensor["shape"]]
                    print(f"    {direction[:-1]:6} {tensor['name']} {tensor['datatype']} {shape}")


def measure_add_sub(url: str, connections: int) -> Row:
    """Time pytorch_addsub; its client checks every answer."""
    measured = pytorch_addsub.measure(url, connections, ADD_SUB_REQUESTS)
    return Row(pytorch_addsub.MODEL, connections, *measured)


def measure_photos(url: str, connections: int) -> Row:
    """Time image_preproc with one photograph per request."""
    photos = image_preproc.example_photos() * PHOTO_ROUNDS
    begin = time.perf_counter()
    answers = image_preproc.preprocess_concurrently(url, photos, connections)
    wall_s = time.perf_counter() - begin
    return Row(image_preproc.MODEL, connections, [answer.latency_s for answer in answers], wall_s)


def measure_labels(url: str, connections: int, model: str) -> Row:
    """Time the pipeline from photograph to labels, one photograph per request."""
    jpegs = [photo.read_bytes() for photo in image_preproc.example_photos() * PHOTO_ROUNDS]

    def one_connection(first: int) -> list[float]:
        latencies_s = []
        with triton.InferenceServerClient(url) as client:
            for jpeg in jpegs[first::connections]:
                sent = time.perf_counter()
                classify.classify(client, [jpeg], model)
                latencies_s.append(time.perf_counter() - sent)
        return latencies_s

    begin = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        taken = list(threads.map(one_connection, range(connections)))
    return Row(model, connections, list(itertools.chain(*taken)), time.perf_counter() - begin)


def print_speeds(rows: Sequence[Row]) -> None:
    """Print the table; the figures are those of a Python client, and include its own time."""
    print("\nmodel            connections  requests   p50 ms   p99 ms  requests/s")
    for model, connections, latencies_s, wall_s in rows:
        p50, p99 = np.percentile(latencies_s, [50, 99]) * 1e3
        count = len(latencies_s)
        print(f"{model:16} {connections:11} {count:9} {p50:8.2f} {p99:8.2f} {count / wall_s:11.0f}")


def show_labels(client: triton.InferenceServerClient) -> None:
    """Print the best guesses for each photograph; the network is not trained."""
    photos = image_preproc.example_photos()
    print("\nlabels, by a network with random weights:")
    found = classify.classify(client, [photo.read_bytes() for photo in photos])
    for photo, guesses in zip(photos, found, strict=True):
        listed = ", ".join(f"{label} {share:.2f}" for label, share in guesses)
        print(f"  {photo.name:28} {listed}")


def show_errors(client: triton.InferenceServerClient) -> None:
    """Send a batch with a truncated photograph in it, then the others without it.

    Raises
    ------
    RuntimeError
        The server took the truncated photograph for a whole one.
    """
    whole = [photo.read_bytes() for photo in image_preproc.example_photos()[:3]]
    print(f"\n{len(whole)} photographs, the second cut in half:")
    try:
        image_preproc.preprocess(client, [whole[0], whole[1][: len(whole[1]) // 2], whole[2]])
    except InferenceServerException as error:
        print(f"  {error}")
    else:
        raise RuntimeError("expected an error for a truncated JPEG file, got an answer")
    print(f"the same, whole: {list(image_preproc.preprocess(client, whole).shape)}")


def write_contact_sheet(client: triton.InferenceServerClient, url: str, output: Path) -> Path:
    """Draw what image_preproc makes of the example photographs and return the picture's path."""
    answers = image_preproc.preprocess_concurrently(url, image_preproc.example_photos(), 4)
    sheet = image_preproc.draw_contact_sheet(answers, image_preproc.normalization(client))
    output.mkdir(parents=True, exist_ok=True)
    path = output / "contact_sheet.png"
    sheet.save(path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the contact sheet")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for the server")
    options = parser.parse_args()

    with triton.InferenceServerClient(options.url) as client:
        wait_until_ready(client, options.timeout)
        list_models(client)
        print_speeds(
            [
                measure_add_sub(options.url, 1),
                measure_add_sub(options.url, 16),
                measure_photos(options.url, 1),
                measure_photos(options.url, 4),
                measure_labels(options.url, 4, classify.MODEL),
                measure_labels(options.url, 4, classify.CALLER),
            ]
        )
        show_labels(client)
        show_errors(client)
        print(f"\ncontact sheet: {write_contact_sheet(client, options.url, options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
