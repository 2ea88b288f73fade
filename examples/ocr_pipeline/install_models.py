"""Make a model repository of this example's models and the networks that the rapidocr package ships.

python examples/ocr_pipeline/install_models.py DIRECTORY
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

import onnxruntime

SOURCE = Path(__file__).parent / "model_repository"
PACKAGE = "rapidocr==3.10.*"
NETWORKS = {
    "text_detector": "PP-OCRv6_det_small.onnx",
    "text_recognizer": "PP-OCRv6_rec_small.onnx",
}


def find_networks() -> Path:
    """Return the folder of the networks, without importing the package.

    Raises
    ------
    FileNotFoundError
        The package is not there, or ships other networks.
    """
    found = importlib.util.find_spec("rapidocr")
    if found is None or found.origin is None:
        raise FileNotFoundError(
            f"expected the package rapidocr, which has the networks: pip install --no-deps '{PACKAGE}'"
        )
    folder = Path(found.origin).parent / "models"
    missing = [name for name in NETWORKS.values() if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"expected {', '.join(missing)} in {folder}: pip install --no-deps '{PACKAGE}'"
        )
    return folder


def install(directory: Path) -> None:
    """Make the repository; what is there of it already is replaced."""
    networks = find_networks()
    shutil.copytree(SOURCE, directory, dirs_exist_ok=True)
    for model, name in NETWORKS.items():
        shutil.copyfile(networks / name, directory / model / "1" / "model.onnx")
    network = onnxruntime.InferenceSession(networks / NETWORKS["text_recognizer"])
    characters = network.get_modelmeta().custom_metadata_map["character"]
    written = directory / "text_decoder" / "1" / "characters.txt"
    written.write_text(characters, encoding="utf-8", newline="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="the model repository to make")
    directory = parser.parse_args().directory
    try:
        install(directory)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"gpubridge serve --model-repository {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
