"""JPEG files to normalised tensors by Pillow and NumPy, as such models are usually written."""

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image, ImageOps

SHORTER, SIDE = 256, 224
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().reshape(-1)
            pixels = np.stack([self.preprocess(file) for file in files])
            tensor = pb_utils.Tensor("PIXELS", pixels)
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses

    def preprocess(self, file):
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB")
        shorter = min(image.size)
        width, height = (SHORTER * side // shorter for side in image.size)
        image = image.resize((width, height), Image.BILINEAR)
        left, top = round((width - SIDE) / 2), round((height - SIDE) / 2)
        image = image.crop((left, top, left + SIDE, top + SIDE))
        pixels = (np.asarray(image, np.float32) / 255 - MEAN) / STD
        return pixels.transpose(2, 0, 1)
