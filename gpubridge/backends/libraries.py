"""Imports the library that a backend is made for."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__all__ = ["import_library"]


def import_library(module: str, requirement: str, backend: str) -> ModuleType:
    """Import a module that the backend needs.

    Parameters
    ----------
    requirement : str
        What to give to ``pip install``.

    Raises
    ------
    ImportError
        Says in which interpreter it is missing, and how to install it there.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"the backend '{backend}' needs {module}, and {sys.executable} cannot import it "
            f"({error}); install it there: {sys.executable} -m pip install {requirement}"
        ) from error
