"""Number of examples of the fuzz tests, and their mutations of valid bytes."""

import os

from hypothesis import settings, strategies as st


def fuzzed(share: float = 1.0) -> settings:
    """Return settings of a fuzz test; one with costly examples takes a ``share`` of the number.

    That is the profile's, or ``GPUBRIDGE_FUZZ_EXAMPLES``.
    """
    number = int(os.environ.get("GPUBRIDGE_FUZZ_EXAMPLES", settings().max_examples))
    return settings(max_examples=max(5, int(number * share)))


_EDIT = st.tuples(
    st.sampled_from(["set", "insert", "cut", "repeat"]),
    st.integers(0, 1 << 20),
    st.integers(1, 16),
    st.one_of(
        st.binary(min_size=1, max_size=8),
        st.sampled_from(
            [b"\0", b"\xff" * 8, b"\x80" * 10 + b"\x01", b"-1", b"99999999999", b"\r\n"]
        ),
    ),
)


def edits(most=6):
    """Up to so many edits of any bytes."""
    return st.lists(_EDIT, max_size=most)


def mutations(valid, most=6):
    """Bytes of the strategy ``valid``, and what becomes of them by up to ``most`` edits."""
    return st.builds(edited, valid, edits(most))


def edited(valid, changes):
    """Return what becomes of bytes by edits."""
    data = bytearray(valid)
    for kind, place, size, new in changes:
        at = place % (len(data) + 1)
        if kind == "set":
            data[at : at + len(new)] = new
        elif kind == "insert":
            data[at:at] = new
        elif kind == "cut":
            del data[at : at + size]
        else:
            data[at:at] = data[at : at + size] * 3
    return bytes(data)


@st.composite
def splits(draw, data):
    """Cut bytes into pieces, as a network may."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
