"""What Triton says of strings that are not what their tensor's shape announces."""

from __future__ import annotations

__all__ = ["string_fault"]

_COUNTED = 100_000


def string_fault(identifier: str, name: str, model: str, buffer: memoryview, count: int) -> str:
    """Say what is wrong with a BYTES input that has been found to be wrong.

    Parameters
    ----------
    identifier : str
        The request's id.
    name, model : str
        Of the input, and of the model it is for.
    buffer : memoryview
        The input.
    count : int
        How many strings its shape asks for.
    """
    prefix = f"[request id: {identifier or '<id_unknown>'}] "
    found = at = length = 0
    while at < len(buffer):
        if found == _COUNTED:
            # Counting on would hold up everyone else.
            return (
                f"{prefix}expected {count} string elements for inference input '{name}' for model "
                f"'{model}', got others: those after the first {found} do not add up to that number"
            )
        left = len(buffer) - at
        if left < 4:
            return (
                f"{prefix}incomplete string length indicator for inference input '{name}' for model "
                f"'{model}', expecting 4 bytes but only {left} bytes available. Please make sure the "
                "string length indicator is in one buffer."
            )
        length = int.from_bytes(buffer[at : at + 4], "little")
        at += 4 + length
        found += 1
        if found > count:
            return (
                f"{prefix}unexpected number of string elements {found} for inference input '{name}' "
                f"for model '{model}', expecting {count}"
            )
    if found < count:
        return (
            f"{prefix}expected {count} string elements for inference input '{name}' for model "
            f"'{model}', got {found}"
        )
    return (
        f"incomplete string data for inference input '{name}', expecting string of length {length} "
        f"but only {length - (at - len(buffer))} bytes available"
    )
