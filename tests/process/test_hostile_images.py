"""A load of hostile files beside good ones: each gets its error, the others their pixels, memory stays."""

import io
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.image_corpus import GOOD_FILES, HOSTILE_FILES
from tests.photos import PHOTO, as_jpeg, claiming
from tests.process.imaging import ask, expected_pixels, write_image_model
from tests.process.server import running_server

CLIENTS = 4
THREADS = 2
ROUNDS = 8
LARGEST = claiming(PHOTO, 2000, 2000)
# Others decode the largest image that is taken.
HOSTILE = {**HOSTILE_FILES, "jpeg: larger than it is": (LARGEST, None)}
SLACK_BYTES = 8 << 20
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 2000 }"


def smaller(file):
    """The same picture, of which hundreds are decoded in no time."""
    image = Image.open(io.BytesIO(file))
    image.thumbnail((160, 160))
    return as_jpeg(image)


GOOD = smaller(PHOTO)


@pytest.fixture(scope="module")
def served(repository):
    write_image_model(repository, more=BATCHING, THREADS=THREADS)
    with running_server(repository) as server:
        yield server


def test_a_load_of_hostile_files_disturbs_nobody(served):
    expected = expected_pixels([GOOD], {"SIZE": "24, 32", "DTYPE": "UINT8"})
    stubs = served.stubs()
    with triton.InferenceServerClient(served.http_url, network_timeout=120) as http:
        # Each thread has had the largest image that is taken, at the same time as the others.
        for _ in range(3):
            refused(http, [LARGEST] * THREADS)
    attack(served, expected, 0)
    files = open_files(stubs)
    sizes = [sum(map(resident, stubs))]
    for seed in range(1, ROUNDS + 1):
        attack(served, expected, seed)
        sizes.append(sum(map(resident, stubs)))
        # Allocators keep what several images took at once, the more the worse these met; not for ever.
        if sizes[-1] <= max(sizes[:-1]) + SLACK_BYTES:
            break
    else:
        pytest.fail(f"memory grows with every round: {sizes}")
    assert served.stubs() == stubs
    # The bridge's arenas are files, too, and as many as the load needs at a time; not one per image.
    more = [now - was for now, was in zip(open_files(stubs), files, strict=True)]
    assert max(more) < len(HOSTILE_FILES), more


def attack(served, expected, seed):
    """Send each hostile file from two clients, in orders of their own, between good ones."""

    def client(number):
        order = random.Random(seed * CLIENTS + number // 2).sample(list(HOSTILE), len(HOSTILE))
        order = order[number % 2 :: 2]
        with triton.InferenceServerClient(served.http_url, network_timeout=120) as http:
            for name in order:
                send(http, name)
                np.testing.assert_array_equal(ask(http, [GOOD]), expected)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))


def send(http, name):
    hostile, message = HOSTILE[name]
    refusal = refused(http, [GOOD, hostile])
    if refusal is None:
        assert message is None, f"{name} was taken for an image"
        return
    assert refusal.status() == "400", f"{name}: {refusal}"
    assert "IMAGE[1]: " in str(refusal), f"{name}: {refusal}"
    assert "IMAGE[0]" not in str(refusal), f"{name}: {refusal}"
    assert message is None or re.search(message, str(refusal)), f"{name}: {refusal}"


def refused(http, files):
    """Return the server's error for files; None when it answers."""
    try:
        ask(http, files)
    except InferenceServerException as error:
        return error
    return None


def resident(pid):
    """Bytes that a process has in memory, by the kernel's own count."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10


def open_files(pids):
    return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]


def test_every_good_file_is_answered_beside_hostile_ones(served):
    parameters = {"SIZE": "24, 32", "DTYPE": "UINT8"}
    hostile, _ = HOSTILE_FILES["png: a bomb"]
    with triton.InferenceServerClient(served.http_url) as http:
        for name, file in GOOD_FILES.items():
            np.testing.assert_array_equal(
                ask(http, [file]), expected_pixels([file], parameters), err_msg=name
            )
            with pytest.raises(InferenceServerException, match="at most 50000000 pixels"):
                ask(http, [file, hostile])
