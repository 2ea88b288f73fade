"""The names under which models import this room."""

from __future__ import annotations

import sys

from gpubridge import pb_utils
from gpubridge.pb_utils import c_module


def register_aliases() -> None:
    """Let models import this room under the names they know.

    A foreign interpreter has only the gpubridge package on its path, not the modules beside it that
    a ``pip install`` puts there; so the stub registers ``triton_python_backend_utils`` and
    ``c_python_backend_utils`` itself, as the very same modules.
    """
    sys.modules["triton_python_backend_utils"] = pb_utils
    sys.modules["c_python_backend_utils"] = c_module
