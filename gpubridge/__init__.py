"""Serve Triton Python backend models; tensors cross between processes by reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubridge.develop.child_server import Server
    from gpubridge.one_file.declare import model

__all__ = ["Server", "__version__", "model"]

__version__ = "0.1.0"

# Imported when first used: a stub imports this package, too.
_PLACES = {"Server": "gpubridge.develop.child_server", "model": "gpubridge.one_file.declare"}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name not in _PLACES:
            raise AttributeError(f"module 'gpubridge' has no attribute '{name}'")
        import importlib  # noqa: PLC0415  (as above)

        found = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
        return found
