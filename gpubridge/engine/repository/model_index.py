"""The repository index: the state of each model version, and why it is unavailable."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

ModelState = Literal["", "LOADING", "READY", "UNLOADING", "UNAVAILABLE"]

_UNLOADED = "unloaded"


@dataclass(slots=True)
class VersionStatus:
    """A row of the repository index.

    - ``version``: 0 if the versions are unknown.
    - ``state``: empty for a model that was never loaded.
    - ``reason``: why it is unavailable.
    - ``wanted``: whether it should be served, so that the server is not ready without it.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    wanted: bool = True


class ModelIndex:
    """The repository index: one row per model version."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, VersionStatus]] = {}
        self._hidden: set[str] = set()

    def set(
        self, name: str, version: int, state: ModelState, reason: str = "", *, wanted: bool = True
    ) -> VersionStatus:
        """Set the state of a version; return the row, for `unloaded`."""
        row = VersionStatus(name, version, state, reason, wanted)
        rows = self._rows.setdefault(name, {})
        # Known versions replace the row of unknown versions.
        rows.pop(0, None)
        rows[version] = row
        return row

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """List an unknown model as loading until its versions are known."""
        row = None if self._rows.get(name) else self.set(name, 0, "LOADING")
        try:
            yield
        finally:
            if row is not None and self._rows.get(name, {}).get(0) is row:
                self.forget(name)

    def load_again(self, name: str, version: int, *, wanted: bool) -> VersionStatus:
        """List a version as loading; it stays wanted if a load of it has failed or goes on."""
        was = self._rows.get(name, {}).get(version)
        if was is not None and was.state in ("LOADING", "UNAVAILABLE"):
            wanted = wanted or was.wanted
        return self.set(name, version, "LOADING", wanted=wanted)

    def unloaded(self, row: VersionStatus) -> None:
        """Mark the version of a row as unloaded, unless another row has replaced it."""
        if self._rows.get(row.name, {}).get(row.version) is row:
            self.set(row.name, row.version, "UNAVAILABLE", row.reason or _UNLOADED, wanted=False)

    def unloaded_unserved(self, name: str) -> None:
        """Mark the versions of a model that was not served as unloaded, once what drains has ended."""
        for row in list(self._rows.get(name, {}).values()):
            row.reason = ""
            if row.state != "UNLOADING":
                self.unloaded(row)

    def keep_wanted(self, name: str, versions: Container[int] = ()) -> None:
        """Mark other versions of a model as not wanted: their failure to load no longer counts."""
        for version, row in self._rows.get(name, {}).items():
            row.wanted = row.wanted and version in versions

    def forget(self, name: str) -> None:
        """Remove a model."""
        self._rows.pop(name, None)

    def hide(self, name: str) -> None:
        """List a model of the repositories by its rows alone, as Triton does once a load found no version."""
        self._hidden.add(name)

    def versions(self, name: str) -> dict[int, VersionStatus]:
        """Return the rows of a model, by version."""
        return self._rows.get(name, {})

    def rows(self, present: Iterable[str] | None = None) -> list[VersionStatus]:
        """Return all rows, by name and version.

        ``present``: the models in the repositories; adds rows for unloaded ones that are not hidden,
        and omits unavailable models that are not there.
        """
        rows = [row for name in sorted(self._rows) for _, row in sorted(self._rows[name].items())]
        if present is None:
            return rows
        names = set(present)
        rows = [row for row in rows if row.name in names or row.state != "UNAVAILABLE"]
        rows += [
            VersionStatus(name, 0, "")
            for name in names.difference(self._hidden, (r.name for r in rows))
        ]
        return sorted(rows, key=lambda row: (row.name, row.version))

    @property
    def failures(self) -> list[VersionStatus]:
        """Return the versions that should be served and are not."""
        return [row for row in self.rows() if row.state == "UNAVAILABLE" and row.wanted]
