"""Modules that the simulated driver refuses: of another architecture, of a newer release, of any bytes."""

import struct

import pytest

from tests.host_kernel.running import build_kernel
from tests.host_kernel.simulated import imaging_environment
from tests.simcuda.processes import running_worker

pytest.importorskip("cuda.bindings")

SUCCESS, INVALID_IMAGE, NO_BINARY, INVALID_PTX, UNSUPPORTED_PTX = 0, 200, 209, 218, 222
LOAD = "answer = int(d.cuModuleLoadData(bytes(told))[0])"


def cubin(architecture, abi=7, machine=190):
    """Return the head of machine code for a GPU."""
    ident = b"\x7fELF\x02\x01\x01\x33" + bytes([abi]) + bytes(7)
    header = struct.pack("=16sHHIQQQIHHHHHH", ident, 2, machine, 1, 0, 0, 0, architecture, *[0] * 6)
    return list(header + b"code")


def ptx(release, architecture):
    return list(b"// text\n.version %d.0\n.target sm_%d\n\0" % (release, architecture))


@pytest.mark.parametrize(
    ("device", "driver", "image", "code"),
    [
        (90, 12090, cubin(90), SUCCESS),
        (86, 12090, cubin(80), SUCCESS),
        (80, 12090, cubin(86), NO_BINARY),
        (75, 12090, cubin(90), NO_BINARY),
        (90, 12090, cubin(80), NO_BINARY),
        (90, 12090, cubin(90, abi=8), INVALID_IMAGE),
        (90, 13000, cubin(90, abi=8), SUCCESS),
        (90, 12090, cubin(90, machine=62), INVALID_IMAGE),
        (90, 12090, ptx(8, 80), SUCCESS),
        (75, 12090, ptx(8, 80), NO_BINARY),
        (90, 12020, ptx(9, 80), UNSUPPORTED_PTX),
        (90, 13000, ptx(9, 80), SUCCESS),
        (90, 12090, list(b"// no PTX\0"), INVALID_PTX),
        (90, 12090, list(b"any bytes at all"), INVALID_IMAGE),
    ],
)
def test_modules_for_the_device_are_loaded(machine, device, driver, image, code):
    machine.set(architecture=device, driver_version=driver)
    with running_worker(machine, {"SIMCUDA_KERNEL": str(build_kernel())}) as worker:
        worker.do("start()")
        assert worker.do(LOAD, image) == code


def test_the_driver_says_what_it_is(machine, worker):
    machine.set(architecture=75, driver_version=12020)
    worker.do("ok(d.cuInit(0)); kinds = d.CUdevice_attribute")
    assert worker.do(
        "answer = [ok(d.cuDriverGetVersion()), ok(d.cuDeviceGetAttribute(kinds(75), 0)),\n"
        "          ok(d.cuDeviceGetAttribute(kinds(76), 0))]"
    ) == [12020, 7, 5]


COMPILE = """
from cuda.bindings import nvrtc as n
program = ok(n.nvrtcCreateProgram(b"code", b"kernel.cu", 0, [], []))
ok(n.nvrtcCompileProgram(program, 1, [told.encode()]))
kind = "CUBIN" if "=sm_" in told else "PTX"
image = bytes(ok(getattr(n, f"nvrtcGet{kind}Size")(program)))
ok(getattr(n, f"nvrtcGet{kind}")(program, image))
answer = int(d.cuModuleLoadData(image)[0])
"""


@pytest.mark.parametrize(
    ("option", "release", "codes"),
    [
        ("sm_90", 12090, (SUCCESS, SUCCESS)),
        ("sm_80", 12090, (NO_BINARY, NO_BINARY)),
        ("compute_80", 12090, (SUCCESS, SUCCESS)),
        ("sm_90", 13000, (INVALID_IMAGE, SUCCESS)),
        ("compute_90", 13000, (UNSUPPORTED_PTX, SUCCESS)),
    ],
)
def test_compiled_modules_fit_their_release(machine, tmp_path, option, release, codes):
    release = {"SIMCUDA_NVRTC_VERSION": str(release)}
    for driver, code in zip((12090, 13000), codes, strict=True):
        machine.set(driver_version=driver)
        environment = imaging_environment(tmp_path, decoder=False) | release
        with running_worker(machine, environment) as worker:
            worker.do("start()")
            assert worker.do(COMPILE, f"--gpu-architecture={option}") == code
