"""Torchvision's way of a batch of JPEG files on a GPU: ``torchvision_images.py FOLDER BATCH SECONDS``."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path


def main() -> int:
    import torch  # noqa: PLC0415  (what is not installed is said, not raised at import)
    from torchvision.io import decode_jpeg  # noqa: PLC0415
    from torchvision.transforms.v2 import functional as transforms  # noqa: PLC0415

    folder, batch, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    files = [
        torch.frombuffer(bytearray(photo.read_bytes()), dtype=torch.uint8)
        for photo in sorted(folder.glob("*.jpg"))
    ]
    mean, deviation = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

    def preprocess(first: int) -> torch.Tensor:
        chosen = list(itertools.islice(itertools.cycle(files), first, first + batch))
        images = decode_jpeg(chosen, mode="RGB", device="cuda")
        made = []
        for image in images:
            resized = transforms.resize(image, [256], antialias=True)
            cropped = transforms.center_crop(resized, [224, 224])
            floats = transforms.to_dtype(cropped, torch.float32, scale=True)
            made.append(transforms.normalize(floats, mean, deviation))
        return torch.stack(made)

    preprocess(0)
    torch.cuda.synchronize()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        preprocess(count % len(files))
        torch.cuda.synchronize()
        count += 1
    print(count * batch / (time.perf_counter() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main())
