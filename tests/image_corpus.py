"""Image files of all kinds, made here: good ones, and malicious ones."""

import io
import struct
import zlib

import numpy as np
from PIL import Image, PngImagePlugin

from tests.photos import PHOTO, as_jpeg, claiming

__all__ = ["GOOD_FILES", "HOSTILE_FILES", "encoded", "xmp"]


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(mode="RGB", size=(61, 43)):
    width, height = size
    levels = np.random.default_rng(5).integers(0, 256, (height, width, 4), np.uint8)
    image = Image.fromarray(levels)  # RGBA
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def sixteen_bits():
    return Image.fromarray(np.arange(61 * 43, dtype=np.uint16).reshape(43, 61) * 25)


def transparent_palette():
    image = picture("P")
    image.info["transparency"] = 3
    return image


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def png_text(key, value):
    chunks = PngImagePlugin.PngInfo()
    chunks.add_itxt(key, value.decode())
    return chunks


def others():
    return [Image.new("RGB", (61, 43), "red"), Image.new("RGB", (61, 43), "blue")]


def xmp(orientation):
    return f'<x:xmpmeta><rdf:li tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


def filled(jpeg):
    """Put filling before the segments of a JPEG, as its standard allows."""
    first = jpeg.index(b"\xff\xda")
    found, at = [jpeg[:2]], 2
    while at <= first:
        end = first if at == first else at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        found += [b"\xff" * 3, jpeg[at:end] if at < first else jpeg[first:]]
        at = end if at < first else first + 1
    return b"".join(found)


GOOD_FILES = {
    "jpeg-baseline": as_jpeg(picture()),
    "jpeg-444": as_jpeg(picture(), subsampling=0),
    "jpeg-progressive": as_jpeg(picture(), progressive=True),
    "jpeg-grayscale": as_jpeg(picture("L")),
    "jpeg-cmyk": as_jpeg(picture("CMYK")),
    **{f"jpeg-exif-{turn}": as_jpeg(picture(), exif=exif(turn)) for turn in range(1, 9)},
    "jpeg-with-more-behind-it": as_jpeg(picture()) + b"and more" * 99,
    "jpeg-with-a-film-behind-it": as_jpeg(picture(), progressive=True) + b"\xff\xda\xff" * 999,
    "jpeg-filled": filled(as_jpeg(picture(), progressive=True)),
    "jpeg-xmp-6": as_jpeg(picture(), xmp=xmp(6)),
    "png-rgb": encoded(picture(), "PNG"),
    "png-alpha": encoded(picture("RGBA"), "PNG"),
    "png-palette": encoded(picture("P"), "PNG"),
    "png-palette-transparent": encoded(transparent_palette(), "PNG", transparency=3),
    "png-gray": encoded(picture("L"), "PNG"),
    "png-gray-alpha": encoded(picture("RGBA").convert("LA"), "PNG"),
    "png-one-bit": encoded(picture("1"), "PNG"),
    "png-16-bit": encoded(sixteen_bits(), "PNG"),
    "png-exif-6": encoded(picture(), "PNG", exif=exif(6)),
    "png-xmp-6": encoded(picture(), "PNG", pnginfo=png_text("XML:com.adobe.xmp", xmp(6))),
    "png-animated": encoded(picture(), "PNG", save_all=True, append_images=others()),
    "webp-lossy": encoded(picture(), "WEBP"),
    "webp-lossless": encoded(picture(), "WEBP", lossless=True),
    "webp-alpha": encoded(picture("RGBA"), "WEBP", lossless=True, exact=True),
    "webp-exif-8": encoded(picture(), "WEBP", exif=exif(8)),
    "webp-xmp-6": encoded(picture(), "WEBP", xmp=xmp(6)),
    "webp-animated": encoded(picture(), "WEBP", save_all=True, append_images=others()),
    "tiff-raw": encoded(picture(), "TIFF"),
    "tiff-deflate": encoded(picture(), "TIFF", compression="tiff_deflate"),
    "tiff-lzw": encoded(picture("L"), "TIFF", compression="tiff_lzw"),
    "tiff-cmyk": encoded(picture("CMYK"), "TIFF"),
    "tiff-16-bit": encoded(sixteen_bits(), "TIFF"),
    "tiff-xmp-6": encoded(picture(), "TIFF", tiffinfo={700: xmp(6)}),
    "tiff-turned": encoded(picture(), "TIFF", tiffinfo={0x0112: 6}),
    "tiff-pages": encoded(picture(), "TIFF", save_all=True, append_images=others()),
}


def png(width, height, data, bits=8, colour=2):
    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


def webp(chunk, body):
    body = chunk + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def tiff(tags):
    """A little-endian file of one directory with tags of the type LONG, and no data to speak of."""
    directory = struct.pack("<H", len(tags))
    for tag, value in sorted(tags.items()):
        directory += struct.pack("<HHII", tag, 4, 1, value)
    return b"II*\0" + struct.pack("<I", 8) + directory + b"\0\0\0\0" + bytes(64)


def tiff_of(width, height, **more):
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 64}
    return tiff({**tags, **{int(tag[1:]): value for tag, value in more.items()}})


def damaged(file, at, change):
    return file[:at] + change + file[at + len(change) :]


def of_bits(jpeg, bits):
    """The same file with another number of bits in its frame header."""
    return damaged(jpeg, jpeg.index(b"\xff\xc0") + 4, bytes([bits]))


def segment(marker, body):
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body


def many_scans():
    jpeg = GOOD_FILES["jpeg-progressive"]
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + scan * 5000 + jpeg[-2:]


def misleading(jpeg, start):
    """Begin a JPEG so that a reader that takes every marker for one with a length sees another frame.

    That reader would skip by the bytes behind ``start`` to a frame that is all in one scan.
    """
    segment = b"\xff\xe1\xff\xff"
    head = jpeg[:2] + start + segment
    at = 4 + int.from_bytes(head[4:6], "big")
    frame = GOOD_FILES["jpeg-444"]
    decoy = frame[frame.index(b"\xff\xc0") :][: (1 << 16) - 1 - 2 - (at - len(head))]
    body = decoy.rjust(at - len(head) + len(decoy), b"\0").ljust((1 << 16) - 1 - 2, b"\0")
    return head + body + jpeg[2:]


HUGE_EXIF = segment(0xE1, b"Exif\0\0" + b"II*\0" + struct.pack("<IH", 8, 65535) + b"\xff" * 65000)
_BROKEN = "truncated or damaged"
_LARGE = "at most 50000000 pixels, got "
#: What is sent, and what is said to it; None where it may be taken for an image or not.
HOSTILE_FILES = {
    "nothing": (b"", "got 0 bytes in all"),
    "one byte": (b"\xff", "got 1 bytes starting FF"),
    "a text": (b"GET / HTTP/1.1\r\n\r\n", "got 18 bytes starting 47 45 54"),
    "base64": (b"/9j/4AAQSkZJRg==", "neither decoded nor in base64"),
    "a pickle": (b"\x80\x04\x95", "got 3 bytes starting 80 04 95"),
    "a gif": (b"GIF89a" + bytes(100), "starting 47 49 46"),
    "a picture of vectors": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "starting 3C 73 76"),
    "jpeg: its start": (PHOTO[:3], _BROKEN),
    "jpeg: its header": (PHOTO[:100], _BROKEN),
    "jpeg: a half": (PHOTO[: len(PHOTO) // 2], _BROKEN),
    "jpeg: no size": (claiming(PHOTO, 0, 0), None),
    "jpeg: too large": (claiming(PHOTO, 65000, 65000), _LARGE + "65000 x 65000"),
    "jpeg: larger than it is": (claiming(PHOTO, 7000, 7000), None),
    "jpeg: noise within": (damaged(PHOTO, len(PHOTO) // 2, bytes(range(256)) * 4), None),
    "jpeg: no tables": (PHOTO.replace(b"\xff\xc4", b"\xff\xfe"), None),
    "jpeg: many scans": (many_scans(), "at most 200 scans"),
    "jpeg: many scans behind filling": (misleading(many_scans(), b"\xff"), "at most 200 scans"),
    "jpeg: many scans behind a short marker": (
        misleading(many_scans(), b"\xff\x01"),
        "at most 200 scans",
    ),
    "jpeg: endless segments": (
        PHOTO[:2] + segment(0xFE, b"") * 20000 + PHOTO[2:],
        "at most 10000 se",
    ),
    "jpeg: endless filling": (
        PHOTO[:2] + b"\xff" * 10**6 + PHOTO[2:],
        "at most 65536 bytes between",
    ),
    "jpeg: 12 bits": (of_bits(PHOTO, 12), "8 bits per sample, got 12; convert"),
    "jpeg: endless exif": (PHOTO[:2] + HUGE_EXIF * 40 + PHOTO[2:], None),
    "png: its start": (b"\x89PNG\r\n\x1a\n", _BROKEN),
    "png: a half": (GOOD_FILES["png-rgb"][:2000], _BROKEN),
    "png: no data": (png(100, 100, b""), _BROKEN),
    "png: too large": (png(100000, 100000, b""), _LARGE + "100000 x 100000"),
    "png: a bomb": (png(30000, 30000, bytes(10**7)), _LARGE + "30000 x 30000"),
    "png: one bit, too large": (png(2**31 - 1, 2**31 - 1, b"", 1, 0), _LARGE),
    "png: no size": (png(0, 0, b""), None),
    "webp: its start": (b"RIFF\0\0\0\0WEBP", _BROKEN),
    "webp: a half": (GOOD_FILES["webp-lossy"][:300], _BROKEN),
    "webp: too large": (
        webp(b"VP8X", b"\0\0\0\0" + b"\xfe\xff\xff" + b"\x1f\0\0"),
        _LARGE + "16777215 x 32",
    ),
    "webp: a large frame": (webp(b"VP8L", b"\x2f" + b"\xff" * 4), _LARGE + "16384 x 16384"),
    "webp: an unknown chunk": (webp(b"XXXX", bytes(100)), _BROKEN),
    "tiff: its start": (b"II*\0", _BROKEN),
    "tiff: a directory nowhere": (b"II*\0\xff\xff\xff\xff", _BROKEN),
    "tiff: too large": (tiff_of(100000, 100000), _LARGE + "100000 x 100000"),
    "tiff: no data": (tiff_of(5000, 5000), _BROKEN),
    "tiff: large tiles": (tiff_of(10, 10, t322=60000, t323=60000), _LARGE + "60000 x 60000"),
    "tiff: many samples": (tiff_of(10, 10, t277=65535), _BROKEN),
    "tiff: a circle": (damaged(GOOD_FILES["tiff-raw"], 4, struct.pack("<I", 4)), _BROKEN),
}
