"""Archives of environments: whatever they hold, nothing is written or leads outside."""

import contextlib
import gzip
import io
import os
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpubridge.engine.environments import unpack_process
from gpubridge.engine.environments.store import EnvironmentStore
from gpubridge.errors import BridgeError, ErrorCode
from tests.fuzz.budget import edited, edits, fuzzed

LIMIT = 1 << 20
QUIET = SimpleNamespace(report=lambda *_, **__: None)
NO_LOCK = -1
REFUSALS = (ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED, ErrorCode.UNAVAILABLE)
# One bad member refuses all of an archive: most are good.
COMMON = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.SYMTYPE])
RARE = st.sampled_from([tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE])
TYPES = st.integers(0, 9).flatmap(lambda n: COMMON if n else RARE)
INSIDE = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
TARGETS = st.one_of(
    st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=5).map("/".join),
    st.sampled_from(["", "/", "/a", "outside", "../outside", "bin/python3", "/usr/bin/python3"]),
)
NAMES = st.integers(0, 9).flatmap(lambda n: INSIDE if n else TARGETS)


@st.composite
def archives(draw):
    """A tar archive of a few members that get in each other's way."""
    target = io.BytesIO()
    style = draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    with tarfile.open(fileobj=target, mode="w", format=style) as packing:
        for name, kind, link in draw(st.lists(st.tuples(NAMES, TYPES, TARGETS), max_size=6)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            data = b"data" if kind == tarfile.REGTYPE else b""
            info.size = len(data)
            packing.addfile(info, io.BytesIO(data))
    return target.getvalue()


def held(data):
    """Return an archive's files and links by name as `tarfile` reads them; the last of a name counts."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as packed:
        for member in packed:
            name = os.path.normpath(member.name)
            if member.issym():
                found[name] = member.linkname
            elif member.islnk():
                found[name] = found[os.path.normpath(member.linkname)]
            elif not member.isdir():
                found[name] = packed.extractfile(member).read()
    return found


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def open_files():
    """Return what the descriptors of this process are of; others come and go beside the test."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))  # noqa: PTH115
    return found


def made(root):
    """Return a directory's contents: the bytes of files and the targets of links by name."""
    found = {}
    for path, folders, files in os.walk(root):
        for here in [Path(path, name) for name in [*folders, *files]]:
            name = str(here.relative_to(root))
            if here.is_symlink():
                # As it is written: a Path would tidy it up.
                found[name] = os.readlink(here)  # noqa: PTH115
                leads = Path(os.path.realpath(here))
                assert leads.is_relative_to(root) or leads.name.startswith("python")
            elif here.is_file():
                found[name] = here.read_bytes()
            else:
                assert here.is_dir()
    return found


def brought(data):
    """Unpack some bytes as an entry of a store; returns what is in it, or None if they are refused.

    All of it is there and marked, or nothing; in neither case has anything come to be elsewhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder).resolve()
        cache = top / "one" / "cache"
        cache.mkdir(parents=True)
        (top / "one" / "outside").write_text("untouched")
        (top / "e.tar.gz").write_bytes(data)
        found = unpacked(top / "e.tar.gz", cache)
        assert not [file for file in open_files() if file.startswith(str(top))]
        assert not os.path.lexists("/a")
        assert names(top) == ["e.tar.gz", "one"]
        assert names(top / "one") == ["cache", "outside"]
        assert (top / "one" / "outside").read_text() == "untouched"
        return found


def unpacked(archive, cache):
    entry = EnvironmentStore(cache).entry("digest")
    refusal = None
    with archive.open("rb") as packed:
        try:
            facts = unpack_process._make(entry, archive, packed, LIMIT, QUIET, NO_LOCK)
        except BridgeError as error:
            refusal = error
    if refusal is not None:
        assert refusal.code in REFUSALS
        # What else the file system would refuse was to be refused before it is asked.
        assert refusal.code is not ErrorCode.UNAVAILABLE or "name too long" in refusal.message
        assert str(archive) in refusal.message
        assert names(cache) == []
        return None
    assert replace(entry.facts(), entries=0) == facts
    assert names(cache) == ["digest"]
    assert names(cache / "digest") == ["complete", "environment"]
    found = made(entry.environment)
    assert len(found) <= facts.members
    assert facts.nbytes <= LIMIT
    return found


@pytest.fixture(scope="module", autouse=True)
def _in_this_process():
    """Replace the parts of the unpacking process: its limit of memory, and the wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpack_process, "_limited_memory", contextlib.nullcontext)
        patch.setattr(unpack_process, "_flush", lambda folder: None)
        yield


@fuzzed(2)
@given(archives())
def test_members_in_each_other_s_way(data):
    found = brought(data)
    assert found is None or found == held(data)


@fuzzed()
@given(archives(), edits())
def test_damaged_archives(data, changes):
    sound = brought(data)
    brought(edited(data, changes))
    # What was wrong is in the way of nothing that is right.
    assert brought(data) == sound


@fuzzed()
@given(archives(), edits())
def test_damaged_packed_archives(data, changes):
    packed = gzip.compress(data, 1, mtime=0)
    sound = brought(packed)
    assert sound is None or sound == held(data)
    # Nothing else than what was packed: its check sum tells.
    assert brought(edited(packed, changes)) in (None, sound)
