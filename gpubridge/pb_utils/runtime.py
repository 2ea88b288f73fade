"""The choice between the two runtimes of a stub: the compiled module's types, or those in Python.

Requests, responses and tensors derive from the fields that are chosen here. Both runtimes behave the
same: the compiled one takes what is usual, and leaves the rest to the code of the other.
"""

from __future__ import annotations

from typing import Any

from gpubridge.tensor.native import native


def fields_type(reference: type) -> Any:
    """Give the compiled base class that does what ``reference`` does; that where there is none."""
    compiled = native()
    return reference if compiled is None else compiled.fields_type(reference)
