"""Packages that only machines with a GPU use have the names, keywords and errors that gpubridge relies on.

Each is installed into a folder of its own and used in a process of its own, without a driver: the simulated driver has doubles
of them instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PHOTO = next((ROOT / "examples" / "image_preproc" / "images").glob("*.jpg"))

pytestmark = [pytest.mark.building, pytest.mark.timeout(600)]

CUPY = """
import sys
import cupy
from types import SimpleNamespace
from gpubridge.pb_utils.framework_arena import _CupyAllocator
from gpubridge.tensor.streams import current_streams

assert int(cupy.__version__.split(".")[0]) >= 14, cupy.__version__
# Form and arguments are those that it takes: what it lacks is the driver.
for use in (lambda: current_streams(0), lambda: cupy.cuda.Device().id):
    try:
        use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        assert "InsufficientDriver" in str(error), error
    else:
        raise AssertionError("there is a driver")
taken = []
data = SimpleNamespace(pointer=4096, hand_out=taken.append)
memory = SimpleNamespace(ordinal=0, allocate_device=lambda size: data)
cupy.cuda.Device = lambda: SimpleNamespace(id=0)
cupy.cuda.get_current_stream = lambda: cupy.cuda.Stream.null
pointer = _CupyAllocator(cupy, memory)(64)
assert (pointer.ptr, pointer.mem.size, taken) == (4096, 64, [1]), (pointer.ptr, taken)
assert callable(cupy.get_default_memory_pool().malloc)
with cupy.cuda.using_allocator(len):
    assert cupy.cuda.get_allocator() is len
"""

NVML = """
import ctypes
import pynvml
from gpubridge.bench import nvml
from gpubridge.telemetry import machine_metrics

names = [f"nvmlDeviceGet{each[2]}" for each in machine_metrics._FAMILIES]
names += ["nvmlDeviceGetUUID", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetCount", "nvmlShutdown"]
assert not [name for name in names if not hasattr(pynvml, name)]
fields = lambda kind: {name for name, _ in kind._fields_}
assert "gpu" in fields(pynvml.c_nvmlUtilization_t)
assert {"total", "used"} <= fields(pynvml.c_nvmlMemory_t)
assert (nvml._SENT, nvml._RECEIVED) == (
    pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES
)
assert ctypes.sizeof(nvml._FieldValue) == ctypes.sizeof(pynvml.c_nvmlFieldValue_t)
assert nvml._LONGEST_RELEASE == pynvml.NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
assert nvml._VIRTUAL == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
print(machine_metrics.open_gpu_metrics())
"""

NVIMGCODEC = """
import sys
from nvidia import nvimgcodec as codec
from gpubridge.backends.image_preproc.device_path import DeviceDecoder
from gpubridge.backends.image_preproc.host_path import NvImageCodecDecoder
from tests.image_settings import image_settings

encoded = open(sys.argv[1], "rb").read()
host = NvImageCodecDecoder(10**9)
assert host.decode(encoded)
stream = codec.CodeStream(encoded)
parameters = codec.DecodeParams(apply_exif_orientation=True, color_spec=codec.ColorSpec.SRGB)
(image,) = host._decoder().decode([stream], params=parameters, cuda_stream=0)
# EXIF may turn it.
assert sorted(image.shape) == sorted((stream.height, stream.width, 3)), image.shape
assert hasattr(type(image), "__cuda_array_interface__")
try:
    DeviceDecoder(image_settings(SIZE="60"), 0, 0)
except RuntimeError as error:
    print(error)
"""

DRIVER = """
from gpubridge.cuda_ipc import probe_devices
print(probe_devices().reason)
"""


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        (["cupy-cuda13x>=14"], CUPY, ""),
        (["nvidia-ml-py"], NVML, "NVML cannot be used: NVML Shared Library Not Found"),
        (["nvidia-nvimgcodec-cu13>=0.8"], NVIMGCODEC, "Could not create decoder"),
        (["cuda-bindings==12.9.*", "cuda-pathfinder"], DRIVER, "no CUDA driver: "),
        (["cuda-bindings==13.*", "cuda-pathfinder"], DRIVER, "no CUDA driver: "),
    ],
    ids=["cupy", "nvml", "nvimgcodec", "bindings-12", "bindings-13"],
)
def test_a_package_is_as_it_is_used(tmp_path, packages, code, said):
    options = ["--no-deps", "--only-binary=:all:", "-q", "--target", str(tmp_path)]
    done = run("-m", "pip", "install", *options, *packages)
    if done.returncode:
        pytest.skip(f"no index has {packages[0]}: {done.stderr.strip().splitlines()[-1]}")
    done = run("-c", code, str(PHOTO), path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def run(*words, path=ROOT):
    """Run the interpreter with the packages of a folder before its own."""
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
