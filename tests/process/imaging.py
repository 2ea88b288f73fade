"""Requests to models of image_preproc, and what they should be answered."""

import numpy as np
import tritonclient.http as triton

from gpubridge.backends.image_preproc.resizing import Normalization, resize_on_host
from tests.image_settings import image_settings
from tests.photos import upright_rgb


def write_image_model(
    repository, name="images", *, kind="KIND_CPU", count=1, more="", **parameters
):
    """Write a model that is parameters alone: 24 x 32 levels, unless they say otherwise."""
    parameters = {"SIZE": "24, 32", "DTYPE": "UINT8", **parameters}
    entries = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in parameters.items()
    )
    gpus = "gpus: [0]" if kind == "KIND_GPU" else ""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(
        f'backend: "image_preproc"\nmax_batch_size: 64\n{more}\n{entries}'
        f"instance_group [{{ kind: {kind} count: {count} {gpus} }}]\n"
    )
    return {key: str(value) for key, value in parameters.items()}


def ask(client, files, model="images", **options):
    """Send files in one request; returns the pixels, or raises what the client raises."""
    images = np.empty((len(files), 1), np.object_)
    images[:, 0] = files
    tensor = triton.InferInput("IMAGE", list(images.shape), "BYTES").set_data_from_numpy(images)
    return client.infer(model, [tensor], **options).as_numpy("PIXELS")


def expected_pixels(files, parameters):
    """Return the pixels of files by Pillow and NumPy."""
    settings = image_settings(**parameters)
    types = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8}
    pixels = np.empty((len(files), *settings.image_shape), types[settings.dtype])
    for file, place in zip(files, pixels, strict=True):
        Normalization(settings).write(resize_on_host(upright_rgb(file), settings), place)
    return pixels
