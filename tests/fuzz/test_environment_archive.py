"""Archives of environments: whatever they hold, nothing is written or leads outside."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given

from gpubridge.engine.environments.archive import UnpackLimits, unpack
from gpubridge.errors import BridgeError
from tests.fuzz.budget import fuzzed, mutations

LIMITS = UnpackLimits(nbytes=1 << 20, members=1000)
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


def try_it(data):
    """Unpack some bytes: all is well, or an error of ours; then look where everything leads."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder).resolve()
        root = top / "one" / "root"
        root.mkdir(parents=True)
        (top / "one" / "outside").write_text("untouched")
        try:
            unpack(io.BytesIO(data), Path("e.tar.gz"), root, LIMITS, lambda done: None)
        except BridgeError:
            pass
        assert [path.name for path in top.iterdir()] == ["one"]
        assert sorted(path.name for path in (top / "one").iterdir()) == ["outside", "root"]
        assert (top / "one" / "outside").read_text() == "untouched"
        for path, folders, files in os.walk(root):
            for name in [*folders, *files]:
                here = Path(path, name)
                if here.is_symlink() and not str(here.readlink()).startswith("/"):
                    leads = Path(os.path.realpath(here))
                    assert leads.is_relative_to(root) or leads.name.startswith("python")
                assert here.is_symlink() or here.is_file() or here.is_dir()


@fuzzed(2)
@given(archives())
def test_members_in_each_other_s_way(data):
    try_it(data)


@fuzzed()
@given(mutations(archives()))
def test_damaged_archives(data):
    try_it(data)


@fuzzed()
@given(mutations(archives().map(lambda data: gzip.compress(data, 1))))
def test_damaged_packed_archives(data):
    try_it(data)
