"""Show a running server at work: text read from photographs, texts by topic, speeds, an error, pictures.

python examples/demo.py --url 127.0.0.1:8000 --output DIR

What it shows depends on the examples that the server serves; image_preproc it needs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tritonclient.http as triton
from image_preproc import client as image_preproc
from ocr_pipeline import client as ocr
from pytorch_addsub import client as pytorch_addsub
from text_topics import client as text_topics
from tritonclient.utils import InferenceServerException

ADD_SUB_REQUESTS = 1000
PHOTO_ROUNDS = 8
TEXT_ROUNDS = 1


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


def list_models(client: triton.InferenceServerClient) -> set[str]:
    """Print the models with their inputs and outputs; return the names of those that are ready."""
    server = client.get_server_metadata()
    print(f"{server['name']} {server['version']} serves:")
    ready = {
        model["name"]
        for model in client.get_model_repository_index()
        if model.get("state") == "READY"
    }
    for name in sorted(ready):
        metadata = client.get_model_metadata(name)
        inputs, outputs = (
            ", ".join(describe(tensor) for tensor in metadata[side])
            for side in ("inputs", "outputs")
        )
        print(f"  {name:16} {inputs} -> {outputs}")
    return ready


def describe(tensor: dict[str, Any]) -> str:
    """Return a tensor's name, type and shape."""
    sizes = ", ".join(str(size) for size in tensor["shape"])
    return f"{tensor['name']} {tensor['datatype']} [{sizes}]"


def show_text(client: triton.InferenceServerClient, output: Path) -> None:
    """Print what is written on the example pictures, and draw each with its text beside it.

    Raises
    ------
    RuntimeError
        The ensemble and the calls read different text.
    """
    print("\ntext of pictures, read by read_text:")
    for path in ocr.example_photos():
        lines = ocr.read_text(client, path.read_bytes())
        texts = [line.text for line in lines]
        right = ocr.character_accuracy(texts, ocr.TRUTH[path.name])
        print(f"  {path.name} ({right:.1%} of its characters are right)")
        for text in texts:
            print(f"    {text}")
        called = [line.text for line in ocr.read_text(client, path.read_bytes(), ocr.CALLER)]
        if called != texts:
            raise RuntimeError(f"expected {texts} of {ocr.CALLER} for {path.name}, got {called}")
        ocr.draw_answer(path, lines).save(output / f"{path.stem}.png")
    print(f"  {ocr.CALLER} reads the same")


def show_topics(client: triton.InferenceServerClient) -> None:
    """Print the nearest of some topics for each of some texts."""
    texts, topics = text_topics.TEXTS, text_topics.TOPICS
    print(f"\ntexts, and the nearest of the topics {', '.join(topics)}, by text_topics:")
    for text, match in zip(texts, text_topics.nearest_topics(client, texts, topics), strict=True):
        print(f"  {match.topic:8} {match.similarity:.2f}  {text}")


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


def measure_text(url: str, connections: int, model: str) -> Row:
    """Time the pipeline from picture to text, one picture per request."""
    files = [path.read_bytes() for path in ocr.example_photos() * TEXT_ROUNDS]

    def one_connection(first: int) -> list[float]:
        latencies_s = []
        with triton.InferenceServerClient(url, network_timeout=600) as client:
            for file in files[first::connections]:
                sent = time.perf_counter()
                ocr.read_text(client, file, model)
                latencies_s.append(time.perf_counter() - sent)
        return latencies_s

    begin = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        taken = list(threads.map(one_connection, range(connections)))
    return Row(model, connections, list(itertools.chain(*taken)), time.perf_counter() - begin)


def measure(url: str, ready: set[str]) -> list[Row]:
    """Time each of the examples that is served, over one and several connections."""
    measured: list[tuple[str, Callable[[], Row]]] = [
        (pytorch_addsub.MODEL, lambda: measure_add_sub(url, 1)),
        (pytorch_addsub.MODEL, lambda: measure_add_sub(url, 16)),
        (image_preproc.MODEL, lambda: measure_photos(url, 1)),
        (image_preproc.MODEL, lambda: measure_photos(url, 4)),
        (ocr.MODEL, lambda: measure_text(url, 4, ocr.MODEL)),
        (ocr.CALLER, lambda: measure_text(url, 4, ocr.CALLER)),
    ]
    return [one() for model, one in measured if model in ready]


def print_speeds(rows: Sequence[Row]) -> None:
    """Print the table; the figures are those of a Python client, and include its own time."""
    print("\nmodel            connections  requests   p50 ms   p99 ms  requests/s")
    for model, connections, latencies_s, wall_s in rows:
        p50, p99 = np.percentile(latencies_s, [50, 99]) * 1e3
        count = len(latencies_s)
        rate = f"{count / wall_s:.3g}" if count < 100 * wall_s else f"{count / wall_s:.0f}"
        print(f"{model:16} {connections:11} {count:9} {p50:8.2f} {p99:8.2f} {rate:>11}")


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
    path = output / "contact_sheet.png"
    sheet.save(path)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the HTTP endpoint")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the contact sheet")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for the server")
    options = parser.parse_args()

    options.output.mkdir(parents=True, exist_ok=True)
    with triton.InferenceServerClient(options.url, network_timeout=600) as client:
        wait_until_ready(client, options.timeout)
        ready = list_models(client)
        if ocr.MODEL in ready:
            show_text(client, options.output)
        if text_topics.MODEL in ready:
            show_topics(client)
        print_speeds(measure(options.url, ready))
        show_errors(client)
        write_contact_sheet(client, options.url, options.output)
    print(f"\npictures: {', '.join(map(str, sorted(options.output.glob('*.png'))))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
