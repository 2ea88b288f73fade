"""Archives of environments: what is unpacked, and what is refused before it does harm."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
from pathlib import Path

import pytest

from gpubridge.engine.environments import archive as archive_module
from gpubridge.engine.environments.archive import UnpackLimits, unpack
from gpubridge.errors import BridgeError, ErrorCode

MIB = 1024 * 1024
LIMITS = UnpackLimits(nbytes=64 * MIB)
NOISE = random.Random(1).randbytes(100_000)


def member(name, data=b"", **fields):
    """A header and its bytes; a regular file unless told otherwise."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def folder(name, **fields):
    return member(name, type=tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def link(name, target):
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def hard_link(name, target):
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def tar(*members):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as packing:
        for info, data in members:
            packing.addfile(info, io.BytesIO(data))
    return target.getvalue()


@pytest.fixture
def place(tmp_path):
    """Directory in which an archive is unpacked; its neighbours must stay as they are."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").write_text("untouched")
    yield root
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["outside", "root"]
    assert (tmp_path / "outside").read_text() == "untouched"


def bring(data, root, limits=LIMITS, tell=lambda done: None):
    return unpack(io.BytesIO(data), "env.tar.gz", root, limits, tell)


def refusal(data, root, limits=LIMITS):
    with pytest.raises(BridgeError) as raised:
        bring(data, root, limits)
    return raised.value


class TestWhatIsUnpacked:
    @pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
    def test_files_folders_and_links(self, place, pack):
        told = []
        data = tar(
            folder("./"),
            folder("./bin"),
            member("./bin/tool", NOISE, mode=0o755, mtime=1_000_000_000),
            link("./bin/also", "tool"),
            link("lib64", "lib"),
            member("lib/deep/er/data.txt", b"text", mode=0o444),
            link("lib/deep/up", "../../bin/tool"),
            hard_link("lib/same", "./bin/tool"),
            hard_link("bin/again", "bin/also"),
            link("bin/python3", "/usr/bin/python3.11"),
            link("lib/nothing", "not/there"),
        )
        done = bring(pack(data), place, tell=lambda done: told.append((done.members, done.nbytes)))
        assert (done.members, done.nbytes) == (11, len(NOISE) + 4) == told[-1]
        assert (place / "bin" / "also").read_bytes() == NOISE
        assert (place / "bin" / "tool").stat().st_mode & 0o7777 == 0o755
        assert (place / "bin" / "tool").stat().st_mtime == 1_000_000_000
        assert (place / "lib" / "same").samefile(place / "bin" / "tool")
        assert (place / "lib" / "deep" / "up").resolve() == place / "bin" / "tool"
        assert (place / "lib64" / "deep" / "er" / "data.txt").read_bytes() == b"text"
        assert (place / "bin" / "again").readlink() == Path("tool")
        assert (place / "bin" / "python3").readlink() == Path("/usr/bin/python3.11")
        assert (place / "lib" / "nothing").is_symlink()

    def test_the_later_of_two_files_of_one_name_counts_and_spares_what_was_linked_to_the_first(
        self, place
    ):
        data = tar(
            member("a", b"one"),
            hard_link("b", "a"),
            link("c", "b"),
            member("a", b"two"),
            member("c"),
        )
        bring(data, place)
        assert [(place / name).read_bytes() for name in "abc"] == [b"two", b"one", b""]
        assert not (place / "c").is_symlink()

    def test_everything_can_be_removed_again_and_nobody_else_can_write(self, place):
        bring(
            tar(folder("d", mode=0o555), member("d/f", mode=0o777), folder("s", mode=0o7777)), place
        )
        assert [(place / name).stat().st_mode & 0o7777 for name in ("d", "d/f", "s")] == [
            0o700,
            0o755,
            0o700,
        ]

    def test_long_names(self, place):
        name = "/".join(["n" * 100] * 8)
        bring(tar(member(name, b"x")), place)
        assert (place / name).read_bytes() == b"x"


ESCAPES = {
    "absolute": (tar(member("/etc/passwd")), "Path is absolute: '/etc/passwd'"),
    "above": (tar(member("../outside", b"x")), "Path contains '..': '../outside'"),
    "above_later": (tar(member("a/../../outside", b"x")), "Path contains '..'"),
    "link_absolute": (tar(link("a", "/etc")), "link to '/etc', which leads to an absolute path"),
    "link_above": (
        tar(link("a", "../outside")),
        "'../outside', which leads out of the environment",
    ),
    "link_below_then_above": (tar(link("d/a", "../../outside")), "leads out of the environment"),
    "link_by_links": (
        tar(link("d/e", "../x/y/z"), folder("x/y/z"), link("w", "d/e/../../../../outside")),
        "member 'w' is a link to",
    ),
    "link_through_the_interpreter": (
        tar(link("bin/python3", "/usr/bin/python3"), link("a", "bin/python3/x")),
        "member 'a' is a link to 'bin/python3/x', which leads to an absolute path",
    ),
    "no_interpreter": (tar(link("bin/python3", "/etc/passwd")), "leads to an absolute path"),
    "interpreter_elsewhere": (tar(link("lib/python3", "/usr/bin/python3")), "absolute path"),
    "circle": (tar(link("a", "b"), link("b", "a")), "leads in a circle"),
    "through_a_link": (
        tar(link("a", ".."), member("a/outside", b"x")),
        "member 'a/outside' is refused: 'a' is no directory in this archive",
    ),
    "through_a_link_absolute": (tar(link("a", "/tmp"), member("a/x")), "'a' is no directory"),
    "hard_link_outside": (tar(hard_link("a", "../outside")), "Path contains '..': '../outside'"),
    "hard_link_absolute": (tar(hard_link("a", "/etc/passwd")), "Path is absolute: '/etc/passwd'"),
    "hard_link_to_nothing": (tar(hard_link("a", "b")), "hard link to 'b': expected a file that"),
    "hard_link_through_a_link": (
        tar(link("a", ".."), hard_link("b", "a/outside")),
        "hard link to 'a/outside': expected a file that comes before it",
    ),
    "hard_link_to_a_bad_link": (
        tar(link("d/a", ".."), hard_link("b", "d/a")),
        "member 'b' is a li",
    ),
    "fifo": (tar(member("p", type=tarfile.FIFOTYPE)), "member 'p' is refused: expected a file, a"),
    "device": (
        tar(member("dev/sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0)),
        "got a device (8, 0)",
    ),
    "character_device": (tar(member("null", type=tarfile.CHRTYPE, devmajor=1)), "a device (1, 0)"),
    "unknown_type": (tar(member("v", type=b"V")), "got type b'V'"),
    "setuid": (tar(member("bin/su", b"x", mode=0o4755)), "set-group-id bit, got mode 4755"),
    "setgid": (tar(member("bin/su", b"x", mode=0o2755)), "set-group-id bit, got mode 2755"),
    "zero_byte": (tar(member("a", pax_headers={"path": "a\0b"})), "zero byte"),
    "file_in_a_file": (tar(member("a", b"x"), member("a/b", b"y")), "'a' is no directory"),
    "file_over_a_folder": (
        tar(folder("a"), member("a", b"x")),
        "there is a directory of that name",
    ),
    "root_as_a_file": (tar(member("./", b"x", type=b"7")), "expected a directory of that name"),
}


@pytest.mark.parametrize("case", ESCAPES)
def test_members_that_lead_outside_are_refused_by_name(place, case):
    data, text = ESCAPES[case]
    error = refusal(data, place)
    assert text in error.message
    assert error.code is ErrorCode.INVALID_ARG


DAMAGED = {
    "empty": (b"", "is no archive: expected a tar archive", "got an empty file"),
    "text": (b"hello world", "is no archive", "begins with b'hello wo'"),
    "zip": (b"PK\x03\x04 and so on", "is a zip archive: expected a tar archive"),
    "zstd": (b"\x28\xb5\x2f\xfd and so on", "is packed with zstd: expected a tar archive"),
    "only_a_head": (b"\x1f\x8b", "is cut short"),
    "no_tar_inside": (gzip.compress(NOISE), "damaged or no tar archive"),
    "cut_short": (gzip.compress(tar(member("a", NOISE)))[:-9000], "is cut short"),
    "cut_short_xz": (lzma.compress(tar(member("a", NOISE)))[:-9000], "is cut short"),
    "cut_in_a_file": (tar(member("a", NOISE))[:50_000], "unexpected end of data"),
    "cut_between_members": (tar(member("a", b"x" * 512), member("b"))[:1024], "damaged"),
    "no_second_header": (tar(member("a", b"x" * 512))[:1024] + b"y" * 4096, "at byte 1024"),
    "negative_size": (tar(member("a")).replace(b"00000000000\0", b"\xff" * 12, 1), "env.tar.gz"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_is_no_archive_is_refused_with_its_kind(place, case):
    data, *texts = DAMAGED[case]
    message = refusal(data, place).message
    assert [text for text in texts if text not in message] == []
    assert "env.tar.gz" in message


def test_a_wrong_check_sum_is_found(place):
    data = bytearray(gzip.compress(tar(member("a", NOISE))))
    data[-8] ^= 1
    assert "is damaged: CRC check failed" in refusal(bytes(data), place).message


class TestLimits:
    def test_a_file_beyond_the_limit_is_refused_before_it_is_written(self, place):
        data = tar(member("a", b"x" * 600), member("b", b"x" * 500))
        message = refusal(data, place, UnpackLimits(nbytes=1000)).message
        assert (
            "member 'b' is refused: expected at most 1000 bytes in all, got 600 and 500" in message
        )
        assert not (place / "b").exists()

    def test_as_much_as_the_limit_is_taken(self, place):
        assert bring(tar(member("a", b"x" * 1000)), place, UnpackLimits(nbytes=1000)).nbytes == 1000

    def test_sizes_in_headers_count(self, place):
        raw = member("a", size=5 * 2**40)[0].tobuf(tarfile.GNU_FORMAT) + bytes(10240)
        assert "expected at most" in refusal(raw, place).message

    def test_holes_are_refused(self, place):
        plain, _ = member("a", type=tarfile.GNUTYPE_SPARSE, size=0)
        raw = bytearray(plain.tobuf(tarfile.GNU_FORMAT))
        raw[386:398] = b"%011o\0" % 0
        raw[398:410] = b"%011o\0" % 0
        raw[483:495] = b"%011o\0" % (MIB)
        raw[148:156] = b" " * 8
        raw[148:156] = b"%06o\0 " % sum(raw)
        data = bytes(raw) + bytes(10240)
        assert "expected a file without holes" in refusal(data, place).message

    def test_members_are_counted(self, place):
        data = tar(*(folder(f"d{i}") for i in range(4)))
        limits = UnpackLimits(nbytes=0, members=3)
        assert "member 'd3' is refused: expected at most 3" in refusal(data, place, limits).message

    def test_a_bomb_is_refused_while_it_unpacks(self, place, monkeypatch):
        monkeypatch.setattr("gpubridge.engine.environments.archive._UNSUSPICIOUS", MIB)
        data = gzip.compress(tar(member("a", bytes(8 * MIB))))
        message = refusal(data, place).message
        assert "expected at most 100 bytes for each packed one, got" in message
        assert (place / "a").stat().st_size < 4 * MIB

    def test_a_bomb_of_headers_is_refused(self, place, monkeypatch):
        monkeypatch.setattr("gpubridge.engine.environments.archive._UNSUSPICIOUS", MIB)
        head = member("x", size=8 * MIB, type=tarfile.XHDTYPE)[0].tobuf(tarfile.USTAR_FORMAT)
        assert (
            "bytes for each packed one"
            in refusal(gzip.compress(head + bytes(8 * MIB)), place).message
        )

    def test_headers_within_headers_are_refused(self, place):
        head = member("x", size=11, type=tarfile.XHDTYPE)[0].tobuf(tarfile.USTAR_FORMAT)
        block = head + b"11 a=bcdef\n".ljust(512, b"\0")
        assert "damaged" in refusal(block * 5000, place).message

    def test_the_disk_is_not_filled(self, place, monkeypatch):
        monkeypatch.setattr(archive_module, "_RESERVED_BYTES", 2**62)
        error = refusal(tar(member("a", b"x")), place)
        assert "does not fit on the disk" in error.message
        assert error.code is ErrorCode.UNAVAILABLE

    def test_a_place_that_cannot_be_written_to(self, place):
        error = refusal(tar(member("n" * 300)), place)
        assert "cannot be written: File name too long" in error.message
