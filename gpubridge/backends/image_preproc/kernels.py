"""CUDA kernels of preprocessing: source, compilation and launch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpubridge.backends.image_preproc.resizing import Axis, Normalization, ResizePlan
from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.cuda_ipc import DeviceContext
from gpubridge.cuda_ipc.devices import image_extra, too_new
from gpubridge.cuda_ipc.driver import call, load
from gpubridge.pb_utils.host import DeviceMemory
from gpubridge.tensor.device_bytes import DeviceBytes

# Weights come from sums in double precision, which Pillow's compiler rounds one by one.
_OPTIONS = ("--std=c++17", "--fmad=false")
_MARK = b"gpubridge kernel 1\n"
_DIGEST = 32
KERNEL = "resize_normalize"
SOURCE = Path(__file__).with_name("resize_normalize.cu")
THREADS = 256
_TILE_WIDTH, _TILE_HEIGHT = 32, 16
_FILTERS = {"nearest": 0, "bilinear": 1, "bicubic": 2, "lanczos": 3}

IMAGE = np.dtype(
    [
        ("origin", np.uint64),
        ("first", np.uint64),
        ("end", np.uint64),
        ("target", np.uint64),
        ("dx", np.int64),
        ("dy", np.int64),
        ("start_x", np.float64),
        ("start_y", np.float64),
        ("step_x", np.float64),
        ("step_y", np.float64),
        ("width", np.int32),
        ("height", np.int32),
        ("target_left", np.int32),
        ("target_top", np.int32),
        ("target_width", np.int32),
        ("target_height", np.int32),
        ("transposed", np.int32),
    ],
    align=True,
)

_TYPES = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int,) * 5, ctypes.c_uint)


class KernelUnavailable(Exception):
    """The kernel cannot be compiled or loaded; the message has the reason and a remedy."""


def kernel_image(source: Path, capability: tuple[int, int], cache: Path | None) -> bytes:
    """Return the kernel's image for the driver; KernelUnavailable if NVRTC does not compile it.

    The headers (``*.cuh``) of ``source`` are beside it; ``cache`` is a directory, created if need be, or
    None to compile in any case.
    """
    nvrtc, version = _load_nvrtc()
    advice = too_new(version[0])
    if advice:
        raise KernelUnavailable(f"NVRTC {version[0]}.{version[1]} cannot be used: {advice}")
    code = source.read_bytes()
    headers = {path.name: path.read_bytes() for path in sorted(source.parent.glob("*.cuh"))}
    quads = f"--define-macro=SHARED_QUADS={shared_quads(capability)}"
    options = (*_OPTIONS, quads, _architecture(nvrtc, capability))
    key = hashlib.sha256(repr((code, headers, options, version)).encode()).hexdigest()
    entry = None if cache is None else cache / key
    if entry is not None:
        kept = _read(entry)
        if kept is not None:
            return kept
    image = _compile(nvrtc, code, headers, options)
    if entry is not None:
        _keep(entry, image)
    return image


def shared_quads(capability: tuple[int, int]) -> int:
    """Return the width of a step, with which the shared memory of a multiprocessor holds four blocks.

    It has 64 KiB in Turing (T4), 96 to 100 KiB in Volta, A10, L4 and the consumer GPUs after them, and 164 KiB or
    more in those of data centres.
    """
    if capability == (7, 5):
        return 8
    roomy = capability in ((8, 0), (8, 7)) or 9 <= capability[0] <= 11
    return 24 if roomy else 16


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels in the user's cache; None for a user without a home."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home).absolute() / "gpubridge" / "kernels"


def _load_nvrtc() -> tuple[Any, tuple[int, int]]:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415  (looks for a library of 100 MB)
    except ImportError as error:
        raise _absent(error) from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    # cuda-python's loader raises different exceptions without the library.
    except Exception as error:
        raise _absent(error) from error
    _check("nvrtcVersion", status)
    return nvrtc, (int(major), int(minor))


def _absent(error: Exception) -> KernelUnavailable:
    # The other lines list the searched folders.
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return KernelUnavailable(
        f"NVRTC, which compiles the kernel, cannot be loaded ({reason}): pip install {image_extra()}"
    )


def _architecture(nvrtc: Any, capability: tuple[int, int]) -> str:
    """Return the option for machine code of this GPU, or for PTX if NVRTC is older than the GPU."""
    status, known = nvrtc.nvrtcGetSupportedArchs()
    _check("nvrtcGetSupportedArchs", status)
    wanted = 10 * capability[0] + capability[1]
    if wanted in known:
        return f"--gpu-architecture=sm_{wanted}"
    older = [number for number in known if number < wanted]
    if not older:
        raise KernelUnavailable(
            f"NVRTC knows GPUs of compute capability {min(known) / 10:.1f} and newer, this one has "
            f"{capability[0]}.{capability[1]}: instead of it, pip install 'gpubridge[image-gpu-cu12]'"
        )
    return f"--gpu-architecture=compute_{max(older)}"


def _compile(
    nvrtc: Any, code: bytes, headers: Mapping[str, bytes], options: tuple[str, ...]
) -> bytes:
    names = [name.encode() for name in headers]
    status, program = nvrtc.nvrtcCreateProgram(
        code, b"kernel.cu", len(names), list(headers.values()), names
    )
    _check("nvrtcCreateProgram", status)
    try:
        arguments = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        if status:
            raise KernelUnavailable(f"NVRTC does not compile the kernel: {_log(nvrtc, program)}")
        kind = "CUBIN" if "=sm_" in options[-1] else "PTX"
        return _output(nvrtc, program, kind)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    return _output(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n ")


def _output(nvrtc: Any, program: Any, kind: str) -> bytes:
    status, nbytes = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
    _check(f"nvrtcGet{kind}Size", status)
    image = bytes(nbytes)  # which the bindings write into
    (status,) = getattr(nvrtc, f"nvrtcGet{kind}")(program, image)
    _check(f"nvrtcGet{kind}", status)
    return image


def _check(call: str, status: Any) -> None:
    if status:
        raise KernelUnavailable(f"{call} failed: {getattr(status, 'name', status)}")


def _read(entry: Path) -> bytes | None:
    """Return a cached kernel; None unless it is complete and only this user can have written it."""
    try:
        for path in (entry.parent, entry):
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        kept = entry.read_bytes()
    except OSError:
        return None
    start = len(_MARK) + _DIGEST
    image = kept[start:]
    if kept[:start] != _MARK + hashlib.sha256(image).digest():
        return None
    return image


def _keep(entry: Path, image: bytes) -> None:
    """Write an entry atomically; concurrent writers write the same bytes."""
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=entry.parent)
    except OSError:
        return  # it will be compiled again
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MARK + hashlib.sha256(image).digest() + image)
        Path(name).replace(entry)
    except OSError:
        Path(name).unlink(missing_ok=True)


#: Images of one launch: a limit of the grid, and a bound for the table.
MOST_IMAGES = 4096


class SourcePixels(NamedTuple):
    """8-bit RGB pixels in memory, as decoded: rows of `width` pixels, `pitch` bytes apart.

    ``orientation``: the EXIF orientation, 1 to 8; 1 is upright.
    """

    pointer: int
    width: int
    height: int
    pitch: int
    orientation: int = 1

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height with the orientation applied."""
        if self.orientation >= 5:
            return self.height, self.width
        return self.width, self.height

    def walk(self) -> tuple[int, int, int]:
        """Return the address of the upright image's first pixel, and the steps right and down."""
        last_column, last_row = 3 * (self.width - 1), self.pitch * (self.height - 1)
        at, dx, dy = {
            1: (0, 3, self.pitch),
            2: (last_column, -3, self.pitch),
            3: (last_row + last_column, -3, -self.pitch),
            4: (last_row, 3, -self.pitch),
            5: (0, self.pitch, 3),
            6: (last_row, -self.pitch, 3),
            7: (last_row + last_column, -self.pitch, -3),
            8: (last_column, self.pitch, -3),
        }[self.orientation]
        return self.pointer + at, dx, dy


class ImageWork(NamedTuple):
    """One image of a launch: its pixels, its plan, and the address of its output."""

    pixels: SourcePixels
    plan: ResizePlan
    target: int


def image_table(work: Sequence[ImageWork]) -> npt.NDArray[np.void]:
    """Return the kernel's description of images: an array of `IMAGE`."""
    return np.array([_entry(*image) for image in work], IMAGE)


def _entry(pixels: SourcePixels, plan: ResizePlan, target: int) -> tuple[float, ...]:
    origin, dx, dy = pixels.walk()
    end = pixels.pointer + pixels.pitch * (pixels.height - 1) + 3 * pixels.width
    part, x, y, down_first = plan
    memory = (origin + part.left * dx + part.top * dy, pixels.pointer, end, target)
    first, second = (dx, x, part.width), (dy, y, part.height)
    if down_first:
        # The kernel resizes rows first, so it gets this image transposed.
        first, second = second, first
    return (*memory, *_sides(*first, *second), int(down_first))


def _sides(dx: int, x: Axis, width: int, dy: int, y: Axis, height: int) -> tuple[float, ...]:
    steps = (dx, dy, x.start, y.start, x.step, y.step)
    return (*steps, width, height, x.at, y.at, x.length, y.length)


def grid(settings: Settings, images: int) -> tuple[int, int]:
    """Return the blocks of a launch: tiles of an image, transposed or not, and images."""
    width, height = settings.width, settings.height
    return max(_tiles(width, height), _tiles(height, width)), images


def _tiles(width: int, height: int) -> int:
    return -(-width // _TILE_WIDTH) * -(-height // _TILE_HEIGHT)


def launch_numbers(settings: Settings, element_bytes: int) -> tuple[int, ...]:
    """Return the arguments after the two tables: five of ``int``, one of ``unsigned``."""
    red, green, blue = settings.pad_levels
    return (
        settings.width,
        settings.height,
        _FILTERS[settings.interpolation],
        int(settings.layout == "NHWC"),
        element_bytes,
        red | green << 8 | blue << 16,
    )


class DeviceKernel:
    """``resize_normalize.cu`` for one model; KernelUnavailable if it cannot be compiled."""

    def __init__(self, settings: Settings, context: DeviceContext, memory: DeviceMemory) -> None:
        self._settings = settings
        self._context = context
        self._memory = memory
        normalization = Normalization(settings)
        self._numbers = launch_numbers(settings, normalization.element_bytes)
        image = kernel_image(SOURCE, compute_capability(context), cache_folder())
        self._levels: DeviceBytes | None = memory.upload(normalization.levels().data)
        self._levels.complete()
        with context.pushed():
            self._module = call("cuModuleLoadData", image)
            self._function = call("cuModuleGetFunction", self._module, KERNEL.encode())

    def launch(self, work: Sequence[ImageWork], stream: int) -> DeviceBytes:
        """Launch the kernel on a stream that is ordered after the images' pixels.

        Returns the table that it reads, to be kept until it is done.
        """
        levels = self._levels
        assert levels is not None  # not closed
        images = self._memory.upload(image_table(work).view(np.uint8).data)
        if images.ready is not None:
            images.ready.order_before(stream)
        values = (images.pointer, levels.pointer, *self._numbers)
        blocks = (*grid(self._settings, len(work)), 1)
        with self._context.pushed():
            call(
                "cuLaunchKernel",
                self._function,
                *(*blocks, THREADS, 1, 1, 0),
                *(stream, (values, _TYPES), 0),
            )
        return images

    def close(self) -> None:
        """Unload the kernel, which must not run any more; idempotent."""
        module, self._module = self._module, None
        self._levels = None
        if module is not None:
            with self._context.pushed():
                call("cuModuleUnload", module)


def compute_capability(context: DeviceContext) -> tuple[int, int]:
    """Return the major and minor number of a device's compute capability."""
    device = call("cuDeviceGet", context.device.ordinal)
    names = load().CUdevice_attribute
    major, minor = (
        int(call("cuDeviceGetAttribute", getattr(names, f"{_ATTRIBUTE}_{part}"), device))
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


_ATTRIBUTE = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"
