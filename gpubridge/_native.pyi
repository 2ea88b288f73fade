"""Types of the compiled module's server half; `gpubridge.dataplane` re-exports them with their contract.

What stubs use of the module is typed in `gpubridge.tensor.native`, since they may run without it.
"""

def split_json_data(document: bytes | memoryview, /) -> tuple[bytes, list[tuple[int, int]]] | None:
    """Take the values of the inputs out of a request's JSON.

    Returns
    -------
    (bytes, list of (int, int)) or None
        The document with an empty array in the place of each ``inputs[i].data`` that is one, and where
        those are (start, bytes). None where they cannot be told by looking at brackets and names:
        what is taken out, and what is left, has still to be parsed.
    """

def pack_json_values(
    document: bytes | memoryview, start: int, nbytes: int, datatype: str, count: int, /
) -> bytes | None:
    """Return the leaves of an array in a document as the bytes of a tensor of ``count`` elements.

    Accepts what orjson accepts, with the same meaning; integers wrap. None for anything else. Holds
    no lock of the interpreter while it works.
    """

def format_json_values(data: bytes | memoryview, datatype: str, count: int, /) -> bytes | None:
    """Return a tensor's elements as a flat JSON array; None for malformed BYTES, or another count.

    Floats have the shortest digits that read back as the same double; NaN, Infinity and -Infinity are
    literals. Bytes of strings that are no UTF-8 go out as they are. Holds no lock of the interpreter
    while it works.
    """

def pack_typed_contents(message: bytes, field: int, form: str, size: int, /) -> bytes | None:
    """Return the values of a repeated field of a serialised message as elements of ``size`` bytes.

    ``form`` is how they lie there: "varint", "fixed", or "bytes" for the strings of a BYTES tensor. None
    for a malformed message. Holds no lock of the interpreter while it works.
    """
