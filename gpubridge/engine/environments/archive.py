"""Safe unpacking of an archive into a directory, within limits.

Nothing is written through a link: links are created last, and only after all of them were found to
stay inside. Owners, times of directories and special permissions are not restored; the times of files
are, since compiled modules are checked against them.
"""

from __future__ import annotations

import gzip
import importlib
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from gpubridge.errors import BridgeError, invalid, unavailable, unsupported

_MIB = 1024 * 1024
_UNSUSPICIOUS = 256 * _MIB
"""Smaller contents are no decompression bomb at any ratio."""

_EXPECTED = "expected a tar archive, packed with gzip (.tar.gz), bzip2 or xz, or not at all"
_HEAD = 512
_TAR_MAGIC = 257
_FOREIGN = {
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"7z\xbc\xaf": "a 7z archive",
}

_HOPS = 40
"""The kernel's limit of links in a row."""

_INTERPRETER = re.compile(r"python[0-9.]*t?")
_CHUNK = 1024 * 1024
_RESERVED_BYTES = 512 * 1024 * 1024
"""Bytes that unpacking leaves free on the disk for other writers."""

_CHECK_EVERY = 64 * 1024 * 1024
"""Bytes written between two checks of the free space."""


class MeteredReader:
    """Reads the contents of a packed file, up to a limit against decompression bombs.

    - ``ratio``: the largest ratio of unpacked to packed bytes.
    - ``damage``: the exception of `inner`, besides OSError, for corrupt data.
    """

    def __init__(
        self,
        packed: BinaryIO,
        inner: BinaryIO,
        path: Path,
        ratio: int,
        damage: type[Exception],
    ) -> None:
        self._packed = packed
        self._inner = inner
        self._path = path
        self._ratio = ratio
        self._damage = damage
        self._read = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end; raises BridgeError: INVALID_ARG."""
        try:
            data = self._inner.read(size)
        except EOFError as error:
            raise invalid(f"environment {self._path} is cut short: {error}") from error
        except (OSError, self._damage) as error:
            raise invalid(f"environment {self._path} is damaged: {error}") from error
        self._read += len(data)
        if self._read > _UNSUSPICIOUS and self._read > self._ratio * self._packed.tell():
            raise invalid(
                f"environment {self._path} is refused: expected at most {self._ratio} bytes for each "
                f"packed one, got {self._read} bytes out of {self._packed.tell()}; pack it without "
                "what is not needed"
            )
        return data

    def drain(self) -> None:
        """Read the rest, which verifies the checksums."""
        while self.read(_MIB):
            pass


def unpacked_bytes(packed: BinaryIO, path: Path, ratio: int) -> MeteredReader:
    """Return a reader of a file's contents; its first bytes decide about the format.

    Raises BridgeError: INVALID_ARG for no archive; UNSUPPORTED for an archive of another format.
    """
    head = packed.read(_HEAD)
    packed.seek(0)
    inner, damage = _open(packed, head, path)
    return MeteredReader(packed, inner, path, ratio, damage)


def _open(packed: BinaryIO, head: bytes, path: Path) -> tuple[BinaryIO, type[Exception]]:
    """Return a decompressor, and its exception, besides OSError, for corrupt data."""
    if head.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=packed, mode="rb")), zlib.error
    try:
        # Not every Python was built with these.
        if head.startswith(b"BZh"):
            bz2 = importlib.import_module("bz2")
            return bz2.BZ2File(packed), ValueError
        if head.startswith(b"\xfd7zXZ\x00"):
            lzma = importlib.import_module("lzma")
            return lzma.LZMAFile(packed), lzma.LZMAError
    except ImportError as error:
        raise unsupported(
            f"environment {path} cannot be unpacked by the server's Python: {error}; pack it with gzip"
        ) from error
    if head[_TAR_MAGIC : _TAR_MAGIC + 5] == b"ustar":
        return packed, OSError
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            raise unsupported(f"environment {path} is {kind}: {_EXPECTED}")
    got = f"a file that begins with {head[:8]!r}" if head else "an empty file"
    raise invalid(f"environment {path} is no archive: {_EXPECTED}, got {got}")


class Escape(Exception):
    """A link leads out of the tree; the message says how."""


def borrows_interpreter(path: str, target: str) -> bool:
    """Return whether a link leads from a virtual environment to its base interpreter.

    This is the only link that may lead outside, as every virtual environment has it: ``bin/python3``
    to an absolute path that ends in the name of an interpreter.
    """
    folder, _, name = path.rpartition("/")
    return (
        folder == "bin"
        and target.startswith("/")
        and _INTERPRETER.fullmatch(name) is not None
        and _INTERPRETER.fullmatch(target.rpartition("/")[2]) is not None
    )


def check_link(path: str, links: Mapping[str, str]) -> None:
    """Follow a link as the kernel would, with all other links in place.

    - ``path``: the link's path below the root of the tree, without ``.`` and ``..``.
    - ``links``: the target of every link of the tree, including `path`, by such a path.

    Raises Escape when it leads out of the tree at any step, or forms a cycle.
    """
    here: list[str] = []
    ahead = path.split("/")[::-1]
    hops = 0
    while ahead:
        part = ahead.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not here:
                raise Escape("leads out of the environment")
            here.pop()
            continue
        here.append(part)
        place = "/".join(here)
        target = links.get(place)
        if target is None:
            continue
        if target.startswith("/"):
            if borrows_interpreter(place, target) and not ahead:
                return
            raise Escape("leads to an absolute path")
        hops += 1
        if hops > _HOPS:
            raise Escape("leads in a circle")
        here.pop()
        ahead += target.split("/")[::-1]


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits of an archive's contents.

    - ``nbytes``: bytes of all files.
    - ``members``: files, directories and links.
    - ``ratio``: unpacked to packed bytes, for large contents.
    """

    nbytes: int
    members: int = 1_000_000
    ratio: int = 100


@dataclass(slots=True)
class Unpacked:
    """Amounts unpacked so far."""

    nbytes: int = 0
    members: int = 0


def unpack(
    packed: BinaryIO,
    path: Path,
    root: Path,
    limits: UnpackLimits,
    report: Callable[[Unpacked], None],
) -> Unpacked:
    """Unpack an archive.

    - ``packed``: the archive, at its beginning.
    - ``root``: an empty directory that no other process writes to.
    - ``report``: called often with the progress.

    Raises BridgeError: INVALID_ARG for a refused member or a corrupt archive; UNAVAILABLE when the
    disk is full or not writable. `root` then has partial contents.
    """
    reader = unpacked_bytes(packed, path, limits.ratio)
    tree = _Tree(path, root, limits, report)
    try:
        # Streaming mode: nothing is read twice, and one block is buffered.
        with tarfile.open(
            fileobj=cast("BinaryIO", reader), mode="r|", tarinfo=_Member, errorlevel=2
        ) as tar:
            while (member := tar.next()) is not None:
                # Older Pythons keep members even in streaming mode.
                tar.members.clear()  # type: ignore[attr-defined]
                tree.add(tar, member)
    except MemoryError as error:
        raise _invalid(path, "its headers need more memory than unpacking may take") from error
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise _invalid(path, f"it is damaged or no tar archive: {error}") from error
    reader.drain()
    try:
        tree.make_links()
    except OSError as error:
        raise _not_written(path, root, error) from error
    return tree.done


class _Member(tarfile.TarInfo):
    """A member that raises ReadError for an invalid header, which tarfile would take for the end."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                raise
            # The position is that of the unpacked bytes.
            raise tarfile.ReadError(f"at byte {tar.offset}: {error}") from error


class _Tree:
    """The directory being filled."""

    def __init__(
        self, path: Path, root: Path, limits: UnpackLimits, report: Callable[[Unpacked], None]
    ) -> None:
        self.done = Unpacked()
        self._path = path
        self._root = root
        self._limits = limits
        self._report = report
        self._folders = {""}
        self._files: set[str] = set()
        self._links: dict[str, str] = {}
        self._checked_at = -_CHECK_EVERY

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Unpack one member."""
        self.done.members += 1
        if self.done.members > self._limits.members:
            raise self._refuse(
                member, f"expected at most {self._limits.members} members, this is one more"
            )
        name = self._inside(member, member.name)
        try:
            self._add(tar, member, name)
        except OSError as error:
            raise _not_written(self._path, self._root / name, error) from error
        self._report(self.done)

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        if member.isdir():
            self._make_folder(member, name)
            return
        if not name:
            raise self._refuse(member, "expected a directory of that name")
        self._make_folder(member, name.rpartition("/")[0])
        if name in self._folders:
            raise self._refuse(member, "there is a directory of that name already")
        # The later of two members of one name wins, as in any tar archive.
        self._links.pop(name, None)
        if name in self._files:
            (self._root / name).unlink()
            self._files.discard(name)
        if member.issym():
            self._links[name] = self._checked_target(member)
        elif member.islnk():
            self._add_hard_link(member, name)
        elif member.isreg() and member.type in tarfile.SUPPORTED_TYPES:
            self._add_file(tar, member, name)
        else:
            raise self._refuse(
                member, f"expected a file, a directory or a link, got {_kind(member)}"
            )

    def _make_folder(self, member: tarfile.TarInfo, name: str) -> None:
        """Create a directory and its parents."""
        if name in self._folders:
            return
        if name in self._files or name in self._links:
            raise self._refuse(member, f"{name!r} is no directory in this archive")
        self._make_folder(member, name.rpartition("/")[0])
        (self._root / name).mkdir(0o700)
        self._folders.add(name)

    def _add_file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        if member.mode & (stat.S_ISUID | stat.S_ISGID):
            raise self._refuse(
                member, f"expected no set-user-id or set-group-id bit, got mode {member.mode:o}"
            )
        if member.issparse():
            # Holes would bypass the ratio limit.
            raise self._refuse(member, "expected a file without holes; pack without --sparse")
        self._check_size(member)
        source = tar.extractfile(member)
        assert source is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._root / name, flags, 0o600)
        try:
            self._files.add(name)
            left = member.size
            while left:
                data = source.read(min(left, _CHUNK))
                if not data:
                    raise _invalid(self._path, f"it is cut short in member {member.name!r}")
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                left -= len(data)
                self.done.nbytes += len(data)
                self._check_free_space(0)
                self._report(self.done)
            os.fchmod(fd, stat.S_IRUSR | stat.S_IWUSR | member.mode & 0o755)
            os.utime(fd, (member.mtime, member.mtime))
        finally:
            os.close(fd)

    def _add_hard_link(self, member: tarfile.TarInfo, name: str) -> None:
        target = self._inside(member, member.linkname)
        if target in self._links:
            self._links[name] = self._links[target]
        elif target in self._files:
            os.link(self._root / target, self._root / name, follow_symlinks=False)
            self._files.add(name)
        else:
            raise self._refuse(
                member,
                f"it is a hard link to {member.linkname!r}: expected a file that comes before it",
            )

    def make_links(self) -> None:
        """Create the symbolic links after checking that all of them stay inside."""
        for name, target in self._links.items():
            try:
                check_link(name, self._links)
            except Escape as error:
                raise _invalid(
                    self._path,
                    f"member {name!r} is a link to {target!r}, which {error}: expected links that stay "
                    "inside, and only the interpreter of a virtual environment outside",
                ) from error
        for name, target in self._links.items():
            (self._root / name).symlink_to(target)

    def _checked_target(self, member: tarfile.TarInfo) -> str:
        if not member.linkname or "\0" in member.linkname:
            raise self._refuse(member, f"it is a link to {member.linkname!r}: expected a path")
        return member.linkname

    def _inside(self, member: tarfile.TarInfo, name: str) -> str:
        """Return a path of the archive relative to the root; refuse paths outside."""
        if name.startswith("/"):
            raise self._refuse(member, f"Path is absolute: {name!r}; expected one inside")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self._refuse(member, f"Path contains '..': {name!r}; expected one inside")
        if "\0" in name:
            raise self._refuse(member, "its path contains a zero byte")
        return "/".join(parts)

    def _check_size(self, member: tarfile.TarInfo) -> None:
        """Refuse a file beyond the limits before any of it is written."""
        limit = self._limits.nbytes
        if member.size < 0 or self.done.nbytes + member.size > limit:
            raise self._refuse(
                member,
                f"expected at most {limit} bytes in all, got {self.done.nbytes} and {member.size} more; "
                "raise --backend-config=python,environment-limit-bytes=N if that is right",
            )
        self._check_free_space(member.size)

    def _check_free_space(self, ahead: int) -> None:
        if ahead < _CHECK_EVERY and self.done.nbytes - self._checked_at < _CHECK_EVERY:
            return
        self._checked_at = self.done.nbytes
        filesystem = os.statvfs(self._root)
        free = filesystem.f_bavail * filesystem.f_frsize - _RESERVED_BYTES
        if ahead > free:
            raise unavailable(
                f"environment {self._path} does not fit on the disk: expected {ahead} bytes at {self._root} "
                f"besides {_RESERVED_BYTES} that stay free, got {max(free, 0)}; name a directory on another "
                "disk with --backend-config=python,environment-cache=DIR"
            )

    def _refuse(self, member: tarfile.TarInfo, why: str) -> BridgeError:
        return _invalid(self._path, f"member {member.name!r} is refused: {why}")


def _kind(member: tarfile.TarInfo) -> str:
    if member.isfifo():
        return "a named pipe"
    if member.isdev():
        return f"a device ({member.devmajor}, {member.devminor})"
    return f"type {member.type!r}"


def _invalid(path: Path, why: str) -> BridgeError:
    return invalid(f"environment {path} cannot be unpacked: {why}")


def _not_written(path: Path, place: Path, error: OSError) -> BridgeError:
    return unavailable(
        f"environment {path} cannot be unpacked: {place} cannot be written: {error.strerror or error}"
    )
