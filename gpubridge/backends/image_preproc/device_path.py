"""Preprocessing on a GPU: files are decoded to its memory, and one launch resizes and normalises them.

A batch is processed in chunks, whose pixels are bounded by DECODE_BYTES: one call decodes all JPEG files on
the GPU; threads decode other formats, and files that the GPU's decoder refuses, and copy the pixels there.
The kernel writes to the final places. A bad image fails only its own request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils

from gpubridge.backends.image_preproc.host_path import (
    DecodedImage,
    ImageRequest,
    PillowDecoder,
    make_decoder,
    nvimagecodec_installed,
)
from gpubridge.backends.image_preproc.image_files import (
    ImageError,
    jpeg_is_whole,
    require_format,
    require_pixels,
    require_plain_jpeg,
)
from gpubridge.backends.image_preproc.kernels import (
    MOST_IMAGES,
    DeviceKernel,
    ImageWork,
    KernelUnavailable,
    SourcePixels,
)
from gpubridge.backends.image_preproc.resizing import plan_resize
from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.cuda_ipc import CopyStream, CudaError, DeviceContext
from gpubridge.cuda_ipc.devices import installed_releases, list_devices, too_new
from gpubridge.cuda_ipc.driver import call, load
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils.host import DeviceMemory, device_memory

_BYTES_OF_PIXEL = 3


class DeviceStream(NamedTuple):
    """A JPEG file whose header was read; ``nbytes`` is the size of its pixels."""

    code: Any
    nbytes: int


class PixelsOnDevice(NamedTuple):
    """Decoded pixels, and the object that owns their memory."""

    source: SourcePixels
    owner: Any


class DeviceDecoder:
    """nvImageCodec on one GPU; pixels are complete on ``stream``. Raises nvImageCodec's exceptions."""

    def __init__(self, settings: Settings, ordinal: int, stream: int) -> None:
        from nvidia import nvimgcodec  # noqa: PLC0415  (optional, and slow to import)

        self._codec = nvimgcodec
        self._stream = stream
        self._max_pixels = settings.decoding.max_pixels
        self._parameters = nvimgcodec.DecodeParams(
            apply_exif_orientation=True, color_spec=nvimgcodec.ColorSpec.SRGB
        )
        kinds = nvimgcodec.BackendKind
        shares = {
            "hardware": (kinds.HW_GPU_ONLY, settings.decoding.hw_load),
            "gpu": (kinds.GPU_ONLY, 1.0),
            "hybrid": (kinds.HYBRID_CPU_GPU, 1.0),
        }
        self._decoder: Any = nvimgcodec.Decoder(
            device_id=ordinal,
            max_num_cpu_threads=settings.decoding.threads,
            backends=[
                nvimgcodec.Backend(kind, load_hint=share)
                for kind, share in (shares[engine] for engine in settings.decoding.engines)
            ],
            options=":fancy_upsampling=1",
        )

    def open(self, encoded: bytes) -> DeviceStream | None:
        """Read the header of a JPEG; None if the CPU has to decode it, ImageError beyond the limits."""
        require_plain_jpeg(encoded, self._max_pixels)
        try:
            code = self._codec.CodeStream(encoded)
            # The first use parses the header.
            width, height, components = code.width, code.height, code.num_channels
        except Exception:  # noqa: BLE001  (the CPU's decoders know more kinds, or say what is wrong)
            return None
        require_pixels(width, height, self._max_pixels)
        # The CPU's decoder handles truncated images and those of four inks.
        if components not in (1, 3) or not jpeg_is_whole(encoded):
            return None
        return DeviceStream(code, width * height * _BYTES_OF_PIXEL)

    def decode(self, streams: Sequence[DeviceStream]) -> list[PixelsOnDevice | None]:
        """Decode images as one batch, on the stream; None for each failure."""
        if not streams:
            return []
        try:
            images = self._decoder.decode(
                [stream.code for stream in streams],
                params=self._parameters,
                cuda_stream=self._stream,
            )
        except Exception:  # noqa: BLE001  (the CPU's decoder says what is wrong with which)
            return [None] * len(streams)
        return [_pixels(image) for image in images]

    def close(self) -> None:
        """Free the decoder and its memory; idempotent."""
        self._decoder = None


def keep_freed_memory(context: DeviceContext, nbytes: int) -> None:
    """Let the device's pool keep freed memory, which would else be mapped anew for each batch."""
    try:
        device = call("cuDeviceGet", context.device.ordinal)
        pool = call("cuDeviceGetDefaultMemPool", device)
        attribute = load().CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call("cuMemPoolSetAttribute", pool, attribute, load().cuuint64_t(nbytes))
    except BridgeError:
        pass  # a device without pools: nothing is allocated from them either


def _pixels(image: Any) -> PixelsOnDevice | None:
    """Return the pixels of an image of nvImageCodec; None unless it has three bytes per pixel."""
    if image is None:
        return None
    described = image.__cuda_array_interface__
    shape, strides = described["shape"], described.get("strides")
    if len(shape) != 3 or shape[2] != _BYTES_OF_PIXEL or described["typestr"] not in ("|u1", "u1"):
        return None
    height, width, _ = (int(dim) for dim in shape)
    pitch = width * _BYTES_OF_PIXEL if strides is None else int(strides[0])
    if strides is not None and tuple(strides[1:]) != (_BYTES_OF_PIXEL, 1):
        return None
    source = SourcePixels(int(described["data"][0]), width, height, pitch)
    return PixelsOnDevice(source, image)


def open_device_path(
    settings: Settings, threads: ThreadPoolExecutor
) -> tuple[DevicePath | None, str]:
    """Return the path on the GPU of this process; or None, and the reason."""
    try:
        return DevicePath(settings, threads, device_memory()), ""
    except pb_utils.TritonModelException:
        return None, "this process cannot use the GPU"
    except (KernelUnavailable, BridgeError) as error:
        return None, str(error)


class _Job:
    """The work on one image."""

    __slots__ = ("encoded", "index", "nbytes", "request", "stream")

    def __init__(self, request: ImageRequest, index: int, encoded: bytes) -> None:
        self.request = request
        self.index = index
        self.encoded = encoded
        self.stream: DeviceStream | None = None
        self.nbytes = 0


class DevicePath:
    """Fills outputs in the GPU's memory; ``threads`` are not closed here.

    Raises KernelUnavailable if there is no kernel, BridgeError if the GPU does not work.
    """

    def __init__(
        self, settings: Settings, threads: ThreadPoolExecutor, memory: DeviceMemory
    ) -> None:
        self._settings = settings
        self._threads = threads
        self._memory = memory
        self._host_decoder: PillowDecoder = make_decoder(
            settings.decoding.decoder, settings.decoding.max_pixels, settings.decoding.formats
        )
        self._context = DeviceContext(list_devices()[memory.ordinal])
        # Libraries use the current context of the thread that runs batches.
        self._context.make_current()
        try:
            self._stream = CopyStream(self._context)
            try:
                self._kernel = DeviceKernel(settings, self._context, memory)
            except BaseException:
                self._stream.close()
                raise
        except BaseException:
            self._context.close()
            raise
        self._decoder, self._reason = self._open_decoder()

    @property
    def description(self) -> str:
        """Description of the decoder and the GPU, for the log."""
        decoding = f"decoding with {self._host_decoder.name} on the CPU ({self._reason})"
        if self._decoder is not None:
            decoding = f"decoding with nvimagecodec ({', '.join(self._settings.decoding.engines)})"
        return f"{decoding}, resizing on GPU {self._memory.ordinal}"

    def fill(self, requests: Sequence[ImageRequest]) -> None:
        """Write the pixels of all requests, or note what is wrong with their images."""
        count = sum(len(request.encoded) for request in requests)
        on_device = self._decoder is not None and count >= self._settings.decoding.device_min_batch
        jobs = []
        for request in requests:
            own = [job for job in self._jobs(request) if self._read_header(job, on_device)]
            if not request.failed and request.allocate_output("cuda"):
                jobs += own
        for chunk in self._chunks(jobs):
            self._preprocess(chunk)

    def close(self) -> None:
        """Free all resources on the GPU."""
        if self._decoder is not None:
            self._decoder.close()
        self._stream.close()
        self._kernel.close()
        self._context.close()

    def _open_decoder(self) -> tuple[DeviceDecoder | None, str]:
        settings = self._settings
        if settings.decoding.decoder == "pillow":
            return None, "as DECODER says"
        if not nvimagecodec_installed():
            return None, "nvImageCodec is not installed"
        try:
            keep_freed_memory(self._context, settings.decoding.device_bytes)
            decoder = DeviceDecoder(settings, self._memory.ordinal, self._stream.handle)
        except Exception as error:  # noqa: BLE001  (of another library; the CPU decodes as well)
            releases = installed_releases("nvidia-nvimgcodec").values()
            advice = too_new(max(releases, default=0))
            said = f"{error}; {advice}" if advice else str(error)
            return None, f"nvImageCodec does not start on the GPU: {said}"
        return decoder, ""

    @staticmethod
    def _jobs(request: ImageRequest) -> list[_Job]:
        return [_Job(request, index, encoded) for index, encoded in enumerate(request.encoded)]

    def _read_header(self, job: _Job, on_device: bool) -> bool:
        """Read the header of an image before memory is allocated for it; return whether it is good."""
        try:
            if require_format(job.encoded, self._settings.decoding.formats) == "JPEG" and on_device:
                assert self._decoder is not None
                job.stream = self._decoder.open(job.encoded)
            if job.stream is None:
                width, height = self._host_decoder.measure(job.encoded)
                job.nbytes = 3 * width * height
            else:
                job.nbytes = job.stream.nbytes
        except ImageError as error:
            job.request.refuse(job.index, error)
            return False
        return True

    def _chunks(self, jobs: list[_Job]) -> Iterator[list[_Job]]:
        """Split a batch by the bytes of its pixels; a chunk has at least one image."""
        chunk: list[_Job] = []
        decoded = uploaded = 0
        for job in jobs:
            if job.request.failed:  # in an earlier chunk
                continue
            decoded += job.nbytes
            # Pixels decoded on the CPU are in the arena, beside the outputs.
            uploaded += job.nbytes if job.stream is None else 0
            full = (
                decoded > self._settings.decoding.device_bytes
                or uploaded > self._memory.capacity // 2
            )
            if chunk and (full or len(chunk) == MOST_IMAGES):
                yield chunk
                chunk, decoded = [], job.nbytes
                uploaded = job.nbytes if job.stream is None else 0
            chunk.append(job)
        if chunk:
            yield chunk

    def _preprocess(self, chunk: list[_Job]) -> None:
        """Decode, resize and normalise a chunk; all memory of it is free on return."""
        on_host = {job: self._decode_on_host(job) for job in chunk if job.stream is None}
        decoded: dict[_Job, PixelsOnDevice] = {}
        if self._decoder is not None:
            on_device = [job for job in chunk if job.stream is not None]
            streams = [job.stream for job in on_device if job.stream is not None]
            for job, pixels in zip(on_device, self._decoder.decode(streams)):
                if pixels is None:
                    on_host[job] = self._decode_on_host(job)
                else:
                    decoded[job] = pixels
        try:
            for job, future in on_host.items():
                uploaded = self._upload(job, future)
                if uploaded is not None:
                    decoded[job] = uploaded
            good = {job: pixels for job, pixels in decoded.items() if not job.request.failed}
            held = self._launch(good) if good else None
        finally:
            # Pixels, table and outputs are kept until the stream has completed.
            self._stream.wait()
        del held

    def _decode_on_host(self, job: _Job) -> Future[DecodedImage]:
        return self._threads.submit(self._host_decoder.decode, job.encoded)

    def _upload(self, job: _Job, future: Future[DecodedImage]) -> PixelsOnDevice | None:
        """Copy the pixels of a thread to the GPU as stored: the kernel applies the orientation."""
        try:
            image = future.result()
            pixels = np.ascontiguousarray(image.stored)
            data = self._memory.upload(pixels.reshape(-1).data)
            if data.ready is not None:
                # The kernel's table may be uploaded on another stream.
                data.ready.order_before(self._stream.handle)
        except ImageError as error:
            job.request.refuse(job.index, error)
            return None
        except BridgeError as error:
            if isinstance(error, CudaError) and error.sticky:
                raise
            full = error.code is ErrorCode.UNAVAILABLE
            reason = (
                "no memory for its pixels" if full else "its pixels cannot be copied to the GPU"
            )
            job.request.refuse(job.index, ImageError(f"{reason}: {error.message}"))
            return None
        height, width, _ = pixels.shape
        source = SourcePixels(data.pointer, width, height, 3 * width, image.orientation)
        return PixelsOnDevice(source, data)

    def _launch(self, images: dict[_Job, PixelsOnDevice]) -> Any:
        """Launch the kernel for images; return the objects to keep until it is done."""
        work = []
        for job, pixels in images.items():
            request = job.request
            target = request.output._device_bytes
            plan = plan_resize(*pixels.source.upright_size, self._settings)
            place = target.pointer + job.index * (target.nbytes // len(request.encoded))
            work.append(ImageWork(pixels.source, plan, place))
            if target.ready is not None:
                target.ready.order_before(self._stream.handle)
        return self._kernel.launch(work, self._stream.handle), images
