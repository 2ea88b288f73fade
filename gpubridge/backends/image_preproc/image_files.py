"""Recognition of image files by their first bytes, and refusals before anything decodes them."""

from __future__ import annotations

from collections.abc import Sequence

FORMATS = ("JPEG", "PNG", "WebP", "TIFF")
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_START_OF_SCAN = b"\xff\xda"
_END_OF_IMAGE = b"\xff\xd9"
# Progressive encoders make about ten. Each costs a pass over all of the image, in a few bytes.
_MOST_SCANS = 200
_MOST_SEGMENTS = 1000
# Start of frame: 0 to 15, but for what is defined between them (DHT, JPG, DAC).
_FRAMES = frozenset({0xC0 + kind for kind in range(16)} - {0xC4, 0xC8, 0xCC})
_SEQUENTIAL = (0xC0, 0xC1)


class ImageError(Exception):
    """An image cannot be used; the message has what was expected, what came, and a remedy."""


def require_format(encoded: bytes, allowed: Sequence[str]) -> str:
    """Return the format of a file; ImageError if it is not allowed."""
    found = _format_of(encoded)
    if found in allowed:
        return found
    names = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
    if found:
        got = f"{found}; convert the file, or add {found} to the model's parameter FORMATS"
    else:
        start = f"starting {encoded[:8].hex(' ').upper()}" if encoded else "in all"
        got = f"{len(encoded)} bytes {start}; send the file's own bytes, neither decoded nor in base64"
    raise ImageError(f"expected a {names} file, got {got}")


def _format_of(encoded: bytes) -> str:
    if encoded.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if encoded.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP":
        return "WebP"
    return "TIFF" if encoded.startswith(_TIFF_STARTS) else ""


def require_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise `ImageError` if an image of this size is over the limit, or has no pixels."""
    if width < 1 or height < 1:
        raise ImageError(f"expected an image with pixels, got {width} x {height}")
    if width * height > max_pixels:
        raise ImageError(
            f"expected at most {max_pixels} pixels, got {width} x {height} = {width * height}; "
            "send a smaller image or raise the model's parameter MAX_PIXELS"
        )


def require_few_scans(encoded: bytes) -> None:
    """Raise `ImageError` for a JPEG that would keep a decoder busy for long."""
    frame, components, scan = _jpeg_start(encoded)
    # Of a frame that is sequential and all in its first scan, decoders read no other.
    if frame in _SEQUENTIAL and components and encoded[scan + 4 : scan + 5] == components:
        return
    scans = encoded.count(_START_OF_SCAN)
    if scans > _MOST_SCANS:
        raise ImageError(
            f"expected at most {_MOST_SCANS} scans in a JPEG file, got {scans}; save the image anew"
        )


def damaged(encoded: bytes, image_format: str, reason: object) -> ImageError:
    """Return the error for a file with a valid start that cannot be decoded."""
    return ImageError(
        f"expected a whole {image_format} file, got {len(encoded)} bytes that are truncated or "
        f"damaged ({reason}); send the file again"
    )


def webp_size(encoded: bytes) -> tuple[int, int]:
    """Return width and height of a WebP file; zeros if its header has none.

    WebP's decoder allocates the whole canvas before it reports the size.
    """
    kind, body = encoded[12:16], encoded[20:30]
    if kind == b"VP8X" and len(body) >= 10:
        return _number(body[4:7]) + 1, _number(body[7:10]) + 1
    if kind == b"VP8 " and len(body) >= 10:
        return _number(body[6:8]) & 0x3FFF, _number(body[8:10]) & 0x3FFF
    if kind == b"VP8L" and len(body) >= 5:
        bits = _number(body[1:5])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return 0, 0


def jpeg_is_whole(encoded: bytes) -> bool:
    """Return whether a JPEG's own scan, not only that of a thumbnail, is followed by an end marker.

    A decoder on a GPU may leave the rest of a truncated image grey without an error.
    """
    _, _, scan = _jpeg_start(encoded)
    return scan > 0 and encoded.rfind(_END_OF_IMAGE) > scan


def _jpeg_start(encoded: bytes) -> tuple[int, bytes, int]:
    """Parse the segments before a JPEG's first scan.

    Returns the kind of its frame, the byte with the number of components, and the offset of the scan's
    segment; zeros if there is none.
    """
    at, frame, components = 2, 0, b""
    for _ in range(_MOST_SEGMENTS):
        if encoded[at : at + 1] != b"\xff" or at + 4 > len(encoded):
            break
        marker = encoded[at + 1]
        if marker == _START_OF_SCAN[1]:
            return frame, components, at
        if marker in _FRAMES:
            frame, components = marker, encoded[at + 9 : at + 10]
        at += 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")
    return frame, components, 0


def _number(little_endian: bytes) -> int:
    return int.from_bytes(little_endian, "little")
