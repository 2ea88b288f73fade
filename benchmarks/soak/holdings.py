"""Resources that a server and its stubs hold: compared before and after a soak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.proc import usage
from gpubridge.bench.processes import process_tree

__all__ = ["Holdings", "holdings"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Holdings:
    """Totals over a server and its stubs; ``segments`` are the pieces of their arenas."""

    processes: int
    threads: int
    descriptors: int
    segments: int
    segments_mib: float
    pss_mib: float

    def excess(self, before: Holdings, pss_mib: float) -> list[str]:
        """Return the resources of which there are more than before; memory may grow by ``pss_mib``.

        A process may have one more thread: a stub starts one when an execute first takes long.
        """
        allowed = {"processes": 0, "threads": self.processes, "descriptors": 0, "segments": 0}
        found = [
            f"{name}: {getattr(before, name)} before, {getattr(self, name)} after"
            for name, more in allowed.items()
            if getattr(self, name) > getattr(before, name) + more
        ]
        if self.pss_mib > before.pss_mib + pss_mib:
            found.append(f"PSS: {before.pss_mib:.1f} MiB before, {self.pss_mib:.1f} MiB after")
        return found


def holdings(root: int) -> Holdings:
    """Return the resources of a process and its descendants."""
    held = usage(root)
    sizes = _segments(root)
    return Holdings(
        processes=held.processes,
        threads=held.threads,
        descriptors=held.descriptors,
        segments=len(sizes),
        segments_mib=sum(sizes.values()) / _MIB,
        pss_mib=held.pss_mib,
    )


def _segments(root: int) -> dict[int, int]:
    """Return the size in bytes of each memfd that a descriptor or a mapping keeps, by inode."""
    sizes: dict[int, int] = {}
    for pid in process_tree(root):
        folder = Path("/proc") / str(pid)
        for path in [*_entries(folder / "fd"), *_entries(folder / "map_files")]:
            try:
                if str(path.readlink()).startswith("/memfd:"):
                    status = path.stat()
                    sizes[status.st_ino] = status.st_blocks * 512
            except OSError:
                continue  # closed meanwhile
    return sizes


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # gone, or not ours to look at
