"""The cache of compiled kernels, and NVRTC itself where it is."""

import re
import threading
from types import SimpleNamespace

import pytest

from gpubridge.backends.image_preproc import kernels
from gpubridge.backends.image_preproc.kernels import (
    SOURCE,
    THREADS,
    KernelUnavailable,
    kernel_image,
)


class Compiler(SimpleNamespace):
    """NVRTC's interface, with machine code that is a number."""

    def __init__(self, known=(80, 90), fails=False):
        super().__init__(known=known, fails=fails, compiled=[], version=(12, 9))

    def nvrtcVersion(self):  # noqa: N802
        return 0, *self.version

    def nvrtcGetSupportedArchs(self):  # noqa: N802
        return 0, list(self.known)

    def nvrtcCreateProgram(self, code, name, count, headers, names):  # noqa: N802
        return 0, code

    def nvrtcCompileProgram(self, program, count, options):  # noqa: N802
        self.compiled.append([option.decode() for option in options])
        return (6 if self.fails else 0,)

    def nvrtcDestroyProgram(self, program):  # noqa: N802
        pass

    def nvrtcGetCUBINSize(self, program):  # noqa: N802
        return 0, 0

    nvrtcGetPTXSize = nvrtcGetCUBINSize  # noqa: N815

    def nvrtcGetCUBIN(self, program, image):  # noqa: N802
        return (0,)

    nvrtcGetPTX = nvrtcGetCUBIN  # noqa: N815

    def nvrtcGetProgramLogSize(self, program):  # noqa: N802
        return 0, 4

    def nvrtcGetProgramLog(self, program, image):  # noqa: N802
        return (0,)


@pytest.fixture
def compiler(monkeypatch):
    found = Compiler()
    monkeypatch.setattr(kernels, "_load_nvrtc", lambda: (found, found.version))
    return found


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text("code")
    return path


def test_a_kernel_is_compiled_once_for_each_source_gpu_and_compiler(
    compiler, source, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    for _ in range(2):
        kernel_image(source, (9, 0), cache)
    quads = "--define-macro=SHARED_QUADS=24"
    assert compiler.compiled == [["--std=c++17", "--fmad=false", quads, "--gpu-architecture=sm_90"]]
    kernel_image(source, (8, 0), cache)
    compiler.version = (13, 0)
    monkeypatch.setattr(kernels, "_load_nvrtc", lambda: (compiler, compiler.version))
    kernel_image(source, (9, 0), cache)
    source.write_text("other code")
    kernel_image(source, (9, 0), cache)
    source.with_name("header.cuh").write_text("more code")
    kernel_image(source, (9, 0), cache)
    assert len(compiler.compiled) == 5
    assert len(list(cache.iterdir())) == 5


def test_a_gpu_that_is_newer_than_the_compiler_gets_code_for_the_driver_to_compile(
    compiler, source
):
    kernel_image(source, (12, 1), None)
    assert compiler.compiled[0][-1] == "--gpu-architecture=compute_90"
    with pytest.raises(KernelUnavailable, match=r"capability 8\.0 and newer, this one has 7\.5"):
        kernel_image(source, (7, 5), None)


def test_a_compiler_that_is_newer_than_the_driver_is_not_used(compiler, source, monkeypatch):
    compiler.version = (13, 5)
    monkeypatch.setattr(kernels, "_load_nvrtc", lambda: (compiler, compiler.version))
    monkeypatch.setattr("gpubridge.cuda_ipc.devices.driver_release", lambda: "12.4")
    with pytest.raises(
        KernelUnavailable, match=r"for CUDA 13, and the driver knows 12\.4: .*-cu12"
    ):
        kernel_image(source, (9, 0), None)
    assert not compiler.compiled


def test_compiler_messages_are_reported(compiler, source):
    compiler.fails = True
    with pytest.raises(KernelUnavailable, match="NVRTC does not compile the kernel"):
        kernel_image(source, (9, 0), None)


@pytest.mark.parametrize("spoil", ["truncated", "emptied", "another version", "open to all"])
def test_an_entry_that_is_not_whole_or_not_ones_own_is_not_used(compiler, source, tmp_path, spoil):
    cache = tmp_path / "cache"
    kernel_image(source, (9, 0), cache)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    if spoil == "open to all":
        entry.chmod(0o666)
    else:
        entry.write_bytes({"truncated": whole[:-1], "emptied": b""}.get(spoil, b"?" + whole[1:]))
    kernel_image(source, (9, 0), cache)
    assert len(compiler.compiled) == 2
    assert entry.read_bytes() == whole
    assert list(cache.iterdir()) == [entry]


def test_many_may_write_the_cache_at_once(compiler, source, tmp_path):
    cache = tmp_path / "cache"
    threads = [
        threading.Thread(target=kernel_image, args=(source, (9, 0), cache)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(cache.iterdir())) == 1
    compiled = len(compiler.compiled)
    kernel_image(source, (9, 0), cache)
    assert len(compiler.compiled) == compiled


def test_no_place_for_a_cache_is_no_error(compiler, source, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for cache in (file, file / "below", None):
        kernel_image(source, (9, 0), cache)
    assert len(compiler.compiled) == 3


USED = re.compile(
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*Used (\d+) registers.* (\d+) bytes smem",
    re.DOTALL,
)
KIB = 1 << 10
# Of a multiprocessor; a block costs 1 KiB more from compute capability 8 on.
SHARED = {
    70: 96,
    72: 96,
    75: 64,
    80: 164,
    87: 164,
    90: 228,
    100: 228,
    101: 228,
    103: 228,
    107: 228,
    110: 228,
}
LEAST_SHARED = 100
REGISTERS, THREADS_OF_T4 = 64 * KIB, 1024


@pytest.mark.extra
def test_four_blocks_of_the_kernel_run_on_a_multiprocessor_of_each_architecture(monkeypatch):
    try:
        nvrtc, _ = kernels._load_nvrtc()
    except KernelUnavailable as error:
        pytest.skip(str(error))
    output, logs = kernels._output, []

    def told(nvrtc, program, kind):
        logs.append(output(nvrtc, program, "ProgramLog").decode())
        return output(nvrtc, program, kind)

    monkeypatch.setattr(kernels, "_output", told)
    monkeypatch.setattr(kernels, "_OPTIONS", (*kernels._OPTIONS, "--ptxas-options=-v"))
    known = [number for number in nvrtc.nvrtcGetSupportedArchs()[1] if number >= 70]
    assert known
    for number in known:
        assert kernel_image(SOURCE, divmod(number, 10), None).startswith(b"\x7fELF")
        stores, loads, registers, shared = map(int, USED.search(logs[-1]).groups())
        kept = 0 if number < 80 else KIB
        assert 4 * (shared + kept) <= SHARED.get(number, LEAST_SHARED) * KIB, (number, shared)
        assert 4 * THREADS * registers <= REGISTERS, (number, registers)
        # Compilers for Volta keep a little beside the registers.
        assert max(stores, loads) <= (64 if number < 75 else 0), (number, logs[-1])
    assert 4 * THREADS <= THREADS_OF_T4
