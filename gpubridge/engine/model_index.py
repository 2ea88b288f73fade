"""The repository index: a row for every version of a model that is, was or should be there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["ModelIndex", "ModelState", "VersionStatus"]

ModelState = Literal["", "LOADING", "READY", "UNLOADING", "UNAVAILABLE"]

_UNLOADED = "unloaded"


@dataclass(slots=True)
class VersionStatus:
    """A row of the repository index.

    Attributes
    ----------
    version : int
        0 when not even the versions could be determined.
    state : str
        Empty for a model that was never loaded.
    reason : str
        Why it is unavailable.
    wanted : bool
        Whether the server is not what it should be while this is unavailable.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    wanted: bool = True


class ModelIndex:
    """Keeps the rows; every method is a step in the life of a version."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, VersionStatus]] = {}

    def loading(self, name: str, version: int) -> None:
        """It is being loaded, and was not served before."""
        self._set(VersionStatus(name, version, "LOADING"))

    def ready(self, name: str, version: int) -> None:
        """It is served."""
        self._set(VersionStatus(name, version, "READY"))

    def failed(self, name: str, version: int, reason: str, *, wanted: bool = True) -> None:
        """It did not load."""
        self._set(VersionStatus(name, version, "UNAVAILABLE", reason, wanted))

    def unloading(self, name: str, version: int) -> VersionStatus:
        """It answers its last requests; returns the row, for :meth:`unloaded`."""
        row = VersionStatus(name, version, "UNLOADING")
        self._set(row)
        return row

    def unloaded(self, row: VersionStatus) -> None:
        """What that row tells of is gone; another that took its place is not."""
        if self._rows.get(row.name, {}).get(row.version) is row:
            self._set(VersionStatus(row.name, row.version, "UNAVAILABLE", _UNLOADED, wanted=False))

    def released(self, name: str) -> None:
        """Nobody wants the model any more: why it did not load is still told, but is no fault."""
        for row in self._rows.get(name, {}).values():
            row.wanted = False

    def forget(self, name: str) -> None:
        """There is no such model any more."""
        self._rows.pop(name, None)

    def versions(self, name: str) -> dict[int, VersionStatus]:
        """Return the rows of a model, by version."""
        return self._rows.get(name, {})

    def rows(self, present: Iterable[str] | None = None) -> list[VersionStatus]:
        """Return all rows, by name and version.

        Parameters
        ----------
        present : iterable of str or None
            The models that the directories have, where they may have others than were loaded: each
            is listed, and no other but those that are served or on their way.
        """
        rows = [row for name in sorted(self._rows) for _, row in sorted(self._rows[name].items())]
        if present is None:
            return rows
        names = set(present)
        rows = [row for row in rows if row.name in names or row.state != "UNAVAILABLE"]
        rows += [VersionStatus(name, 0, "") for name in names.difference(r.name for r in rows)]
        return sorted(rows, key=lambda row: (row.name, row.version))

    @property
    def failures(self) -> list[VersionStatus]:
        """What should be served and is not."""
        return [row for row in self.rows() if row.state == "UNAVAILABLE" and row.wanted]

    def _set(self, row: VersionStatus) -> None:
        rows = self._rows.setdefault(row.name, {})
        # Once its versions are known, that they were not is of no interest.
        rows.pop(0, None)
        rows[row.version] = row
