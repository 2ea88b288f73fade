"""Prints the configurations of the models that a file declares, or its error, as JSON."""

from __future__ import annotations

import json
import os
import sys

from gpubridge.errors import BridgeError
from gpubridge.one_file.adapter import load_file
from gpubridge.parent_death import die_with
from gpubridge.stub.error_text import model_error_text
from gpubridge.stub.loader import register_aliases


def main(path: str, asker: int) -> None:
    """Import the file, whose own output goes to stderr; end with the process that asks."""
    die_with(asker)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    register_aliases()
    # As in a model's process.
    sys.argv = [""]
    sys.path.insert(0, "")
    try:
        found = {name: declared.config for name, declared in load_file(path).items()}
        json.dump({"models": found}, answer)
    except BaseException as error:  # noqa: BLE001  (reported to who asked)
        text = error.message if isinstance(error, BridgeError) else model_error_text(error)
        json.dump({"error": text}, answer)
    answer.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
