"""Serve Triton Python backend models; tensors cross between processes by reference."""

__all__ = ["__version__"]

__version__ = "0.1.0"
