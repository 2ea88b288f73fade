"""The decoder's double makes its images in the order of a stream: who does not wait for that sees it."""

import io
from pathlib import Path

import numpy as np
import pytest

from tests.process.server_process import wait_until

pytest.importorskip("cuda.bindings")
Image = pytest.importorskip("PIL.Image")

PACKAGES = Path(__file__).parent / "packages"
DECODE = """
import sys
sys.path.insert(0, told[0])
for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
    del sys.modules[name]
from nvidia import nvimgcodec as n
start()
stream, other = int(ok(d.cuStreamCreate(1))), ok(d.cuStreamCreate(1))
decoder = n.Decoder(0, options=":fancy_upsampling=1")
code = n.CodeStream(bytes(told[1]))
place = int(ok(d.cuMemHostAlloc(12, 0)))
# An image stays incomplete until `released`.
n._sleep = ctypes.cast(gate, ctypes.c_void_p).value

def first_pixels(image, on):
    pointer = image.__cuda_array_interface__["data"][0]
    ok(d.cuMemcpyDtoHAsync(place, pointer, 12, on)); ok(d.cuStreamSynchronize(on))
    return list((ctypes.c_ubyte * 12).from_address(place))
"""


def test_an_image_is_complete_on_its_stream_and_not_before(worker):
    encoded = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), 77, np.uint8)).save(encoded, "JPEG")
    worker.do(DECODE, [str(PACKAGES), list(encoded.getvalue())])
    # The second image may lie where the first one was.
    for _ in range(2):
        worker.do("released.clear(); (image,) = decoder.decode([code], None, stream)")
        wait_until(
            lambda: worker.do("answer = first_pixels(image, other)") != [77] * 12,
            "another stream to see an image that is not complete",
        )
        late = worker.do("released.set(); answer = first_pixels(image, stream)")
        assert late == [77] * 12
        worker.do("del image")
