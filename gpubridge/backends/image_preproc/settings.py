"""Configuration of a model of this backend, read once and checked."""

from __future__ import annotations

from dataclasses import dataclass

from gpubridge.backends.image_preproc.image_files import FORMATS
from gpubridge.backends.model_setup import ModelSetup, Parameters, TensorSetup

INPUT = "IMAGE"
OUTPUT = "PIXELS"
DECODERS = ("auto", "nvimagecodec", "pillow")
DECODE_ENGINES = ("hardware", "gpu", "hybrid")
DTYPES = ("FP32", "FP16", "BF16", "UINT8")
INTERPOLATIONS = ("bilinear", "nearest", "bicubic", "lanczos")
LAYOUTS = ("NCHW", "NHWC")
RESIZE_MODES = ("crop", "stretch", "pad")
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_MARGIN = 8 / 7  # 256 for 224
_NORMALIZING = ("NORMALIZE_MEAN", "NORMALIZE_STD")
_LARGEST = {"FP16": 65504.0, "BF16": 3.38e38, "FP32": 3.4e38}


@dataclass(frozen=True)
class DecodingSettings:
    """Decoders of image files, and their limits.

    - ``engines``: the GPU decoders to use; ``hw_load``: the hardware engine's share.
    - ``device_min_batch``: fewer images than this are decoded on the CPU.
    - ``device_bytes``: limit of the decoded pixels on the GPU at a time.
    """

    decoder: str
    formats: tuple[str, ...]
    max_pixels: int
    threads: int
    engines: tuple[str, ...]
    hw_load: float
    device_min_batch: int
    device_bytes: int

    @classmethod
    def from_setup(cls, setup: ModelSetup) -> DecodingSettings:
        """Read a model's parameters; may raise ValueError."""
        parameters = setup.parameters
        return cls(
            max_pixels=parameters.whole_number("MAX_PIXELS", 50_000_000),
            formats=parameters.choices("FORMATS", FORMATS),
            decoder=parameters.choice("DECODER", "auto", DECODERS),
            threads=parameters.whole_number("THREADS", setup.threads),
            engines=parameters.choices("DECODE_ENGINES", DECODE_ENGINES),
            hw_load=parameters.share("HW_LOAD", 1.0),
            device_min_batch=parameters.whole_number("DEVICE_DECODE_MIN_BATCH", 1),
            device_bytes=parameters.whole_number("DECODE_BYTES", 128 << 20),
        )


@dataclass(frozen=True)
class Settings:
    """Sizes in pixels; `mean` and `std` for R, G, B on a scale of 0 to 1.

    - ``images``: whether the output's first dimension counts images, as the batch's does.
    """

    height: int
    width: int
    layout: str
    dtype: str
    resize_mode: str
    shorter_side: int
    interpolation: str
    pad_color: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    decoding: DecodingSettings
    images: bool = True
    input_name: str = INPUT
    output_name: str = OUTPUT

    @classmethod
    def from_setup(cls, setup: ModelSetup) -> Settings:
        """Read a model's parameters and check its tensors against them; may raise ValueError."""
        parameters = setup.parameters
        _only("input", setup.inputs)
        output = _only("output", setup.outputs)
        layout = parameters.choice("LAYOUT", "NCHW", LAYOUTS)
        height, width = _size(parameters, layout, output)
        mode = parameters.choice("RESIZE_MODE", "crop", RESIZE_MODES)
        dtype = "FP32" if output is None else output.data_type.replace("TYPE_", "")
        dtype = parameters.choice("DTYPE", dtype, DTYPES)
        settings = cls(
            height=height,
            width=width,
            layout=layout,
            dtype=dtype,
            resize_mode=mode,
            shorter_side=_shorter_side(parameters, mode, max(height, width)),
            interpolation=parameters.choice("INTERPOLATION", "bilinear", INTERPOLATIONS),
            pad_color=parameters.numbers("PAD_COLOR", (0, 0, 0), "three numbers 'R, G, B'"),
            mean=parameters.numbers("NORMALIZE_MEAN", _IMAGENET_MEAN, "three numbers 'R, G, B'"),
            std=parameters.numbers("NORMALIZE_STD", _IMAGENET_STD, "three numbers 'R, G, B'"),
            decoding=DecodingSettings.from_setup(setup),
            images=setup.max_batch_size > 0 or output is None or len(output.dims) > len(layout) - 1,
            input_name=setup.inputs[0].name if setup.inputs else INPUT,
            output_name=OUTPUT if output is None else output.name,
        )
        parameters.refuse_misspelt("image_preproc", others=True)
        settings._check_parameters(parameters)
        settings._check_tensors(setup)
        return settings

    @property
    def pad_levels(self) -> tuple[int, int, int]:
        """The colour of a border, in whole levels."""
        red, green, blue = (round(value) for value in self.pad_color)
        return red, green, blue

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of one image."""
        if self.layout == "NHWC":
            return self.height, self.width, 3
        return 3, self.height, self.width

    def input(self, batched: bool) -> TensorSetup:
        """Return the default input."""
        return TensorSetup(INPUT, "TYPE_STRING", (1,) if batched else (-1,))

    def output(self, batched: bool) -> TensorSetup:
        """Return the default output."""
        dims = self.image_shape if batched else (-1, *self.image_shape)
        return TensorSetup(OUTPUT, f"TYPE_{self.dtype}", dims)

    def notices(self) -> list[str]:
        """Return log messages about values that are likely to be mistakes."""
        return [
            f"parameter {key}: expected numbers on a scale of 0 to 1, got {values}, which look like "
            "those for levels from 0 to 255; divide them by 255"
            for key, values in zip(_NORMALIZING, (self.mean, self.std))
            if max(values) > 1
        ]

    def _check_parameters(self, parameters: Parameters) -> None:
        if min(self.std) <= 0:
            raise ValueError(f"parameter NORMALIZE_STD: expected numbers above 0, got {self.std}")
        spread = [
            abs(value) / std
            for mean, std in zip(self.mean, self.std)
            for value in (1, mean, 1 - mean)
        ]
        if self.dtype in _LARGEST and max(spread) > _LARGEST[self.dtype]:
            raise ValueError(
                f"parameters NORMALIZE_MEAN and NORMALIZE_STD: expected values that {self.dtype} has, got "
                f"{max(spread):g} from {self.mean} and {self.std}"
            )
        if not all(0 <= value <= 255 for value in self.pad_color):
            raise ValueError(
                f"parameter PAD_COLOR: expected numbers from 0 to 255, got {self.pad_color}"
            )
        if self.resize_mode != "pad" and "PAD_COLOR" in parameters:
            raise ValueError(
                f"parameter PAD_COLOR: expected with RESIZE_MODE pad only, got {self.resize_mode}"
            )
        given = [key for key in _NORMALIZING if key in parameters]
        if self.dtype == "UINT8" and given:
            raise ValueError(
                f"parameter {given[0]}: expected with DTYPE FP32, FP16 or BF16 only, got UINT8, which is "
                "the pixels as they are"
            )

    def _check_tensors(self, setup: ModelSetup) -> None:
        batched = setup.max_batch_size > 0
        for entry in setup.inputs:
            if entry.data_type != "TYPE_STRING" or entry.dims not in _INPUT_DIMS[batched]:
                expected = " or ".join(str(list(dims)) for dims in _INPUT_DIMS[batched])
                raise ValueError(
                    f"input '{entry.name}': expected TYPE_STRING of dims {expected}, an image file "
                    f"per element, got {entry.data_type} of dims {list(entry.dims)}"
                )
        expected_dims: list[tuple[int, ...]] = (
            [self.image_shape] if batched else [(-1, *self.image_shape)]
        )
        if not batched and all(entry.dims == (1,) for entry in setup.inputs):
            expected_dims.append(self.image_shape)
        for entry in setup.outputs:
            data_type = f"TYPE_{self.dtype}"
            if entry.data_type != data_type or entry.dims not in expected_dims:
                expected = " or ".join(str(list(dims)) for dims in expected_dims)
                raise ValueError(
                    f"output '{entry.name}': expected {data_type} of dims {expected}, as the "
                    f"parameters say, got {entry.data_type} of dims {list(entry.dims)}"
                )


_INPUT_DIMS = {True: ((1,),), False: ((-1,), (1,))}


def _only(kind: str, tensors: tuple[TensorSetup, ...]) -> TensorSetup | None:
    if len(tensors) > 1:
        names = ", ".join(tensor.name for tensor in tensors)
        raise ValueError(f"expected one {kind} in config.pbtxt, got {len(tensors)}: {names}")
    return tensors[0] if tensors else None


def _size(parameters: Parameters, layout: str, output: TensorSetup | None) -> tuple[int, int]:
    """Return height and width, from SIZE or from the output's dims."""
    if "SIZE" not in parameters:
        dims = output.dims[-3:] if output is not None else ()
        height, width = (dims[:2] if layout == "NHWC" else dims[1:]) or (-1, -1)
        if height < 1 or width < 1:
            raise ValueError(
                "parameter SIZE: expected the height and width of the pixels, such as '224' or "
                "'480, 640', got neither that nor an output with those dims"
            )
        return height, width
    text = parameters.text("SIZE", "")
    sides = [side.strip() for side in text.split(",")]
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() and int(side) for side in sides):
        raise ValueError(
            f"parameter SIZE: expected 'HEIGHT, WIDTH' or one number for both, got '{text}'"
        )
    return int(sides[0]), int(sides[-1])


def _shorter_side(parameters: Parameters, mode: str, largest: int) -> int:
    """Return the length of the shorter side after resizing, before the crop."""
    shorter = parameters.whole_number("RESIZE_SHORTER_SIDE", round(largest * _MARGIN))
    if "RESIZE_SHORTER_SIDE" in parameters and mode != "crop":
        raise ValueError(
            f"parameter RESIZE_SHORTER_SIDE: expected with RESIZE_MODE crop only, got {mode}"
        )
    if shorter < largest:
        raise ValueError(
            f"parameter RESIZE_SHORTER_SIDE: expected at least {largest}, the larger side of the "
            f"crop, got {shorter}"
        )
    return shorter
