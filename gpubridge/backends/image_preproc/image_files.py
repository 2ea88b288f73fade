"""Recognition of image files by their first bytes, and refusals before anything decodes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

FORMATS = ("JPEG", "PNG", "WebP", "TIFF")
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_SIGNATURE = 2
# What follows a 0xFF and is no marker with a meaning of its own: stuffing (00), filling (FF), and the
# markers without a length that stand within scans or nowhere (TEM, RST0 to RST7).
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")
_START_OF_IMAGE, _END_OF_IMAGE, _START_OF_SCAN = 0xD8, 0xD9, 0xDA
# Progressive encoders make about ten. Each costs a pass over all of the image, in a few bytes: an image
# of the most pixels may have so many, a smaller one more, as it is smaller, up to the most.
_SCANS_OF_LARGEST = 20
_MOST_SCANS = 200
# Decoders read segments one by one, and what is between them byte by byte.
_MOST_SEGMENTS = 10_000
_MOST_FILLING = 64 << 10
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


def require_plain_jpeg(encoded: bytes, max_pixels: int) -> None:
    """Raise `ImageError` for a JPEG that would keep a decoder busy for long, or that none decodes.

    ``max_pixels``: the size of the largest images, which have the smallest limit of scans.
    """
    frame = components = scans = filling = 0
    end, most_scans = _SIGNATURE, _MOST_SCANS
    for count, (marker, at) in enumerate(jpeg_markers(encoded)):
        filling += 0 if scans else at - end
        if count >= _MOST_SEGMENTS or filling > _MOST_FILLING:
            raise ImageError(
                f"expected a JPEG file of at most {_MOST_SEGMENTS} segments, with at most {_MOST_FILLING} "
                "bytes between those before its first scan, got more; save the image anew"
            )
        fields = encoded[at + 2 : at + 10]
        end = at + 2 + int.from_bytes(fields[:2], "big")
        if marker in _FRAMES and len(fields) == 8:
            frame, components = marker, fields[7]
            pixels = int.from_bytes(fields[3:5], "big") * int.from_bytes(fields[5:7], "big")
            allowed = _SCANS_OF_LARGEST * max_pixels // max(1, pixels)
            most_scans = min(_MOST_SCANS, max(_SCANS_OF_LARGEST, allowed))
            if fields[2] != 8:
                raise ImageError(
                    f"expected a JPEG file of 8 bits per sample, got {fields[2]}; convert the image to 8 bits"
                )
        elif marker == _START_OF_SCAN:
            scans += 1
            # Of a frame that is sequential and all in its first scan, decoders read no other.
            if scans == 1 and frame in _SEQUENTIAL and fields[2:3] == bytes([components]):
                return
            if scans > most_scans:
                raise ImageError(
                    f"expected at most {most_scans} scans in a JPEG file of that size, got more; save the "
                    "image anew"
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
    """Return whether a JPEG's own scans, not only those of a thumbnail, are followed by an end marker.

    A decoder on a GPU may leave the rest of a truncated image grey without an error.
    """
    kinds = [marker for marker, _ in islice(jpeg_markers(encoded), _MOST_SEGMENTS)]
    return _START_OF_SCAN in kinds and kinds[-1] == _END_OF_IMAGE


def jpeg_markers(encoded: bytes) -> Iterator[tuple[int, int]]:
    """Yield the kind and the offset of each marker of a JPEG, from its start to its end marker.

    Markers are found as decoders find them: segments are skipped by their length, filling and the bytes
    of scans by what they are. TEM and RST are left out.
    """
    at = _SIGNATURE
    while (found := _MARKER.search(encoded, at)) is not None:
        at = found.start()
        marker = encoded[at + 1]
        yield marker, at
        if marker == _END_OF_IMAGE:
            return
        at += 2
        if marker != _START_OF_IMAGE:
            at += max(2, int.from_bytes(encoded[at : at + 2], "big"))


def _number(little_endian: bytes) -> int:
    return int.from_bytes(little_endian, "little")
