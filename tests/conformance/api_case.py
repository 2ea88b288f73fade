"""One case of the API probe: a row of the API's tables, and code for a model to run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ApiCase"]


@dataclass(frozen=True)
class ApiCase:
    """Code that a model runs and what it is asked by.

    Parameters
    ----------
    part, row
        The part of the API's tables, and the row of it.
    name
        Unique within the part and row.
    code
        Runs in a model of ``api_repository``; its value, or the variable ``said``, is answered.
    model
        Which of the models runs it.
    """

    part: str
    row: str
    name: str
    code: str
    model: str = "api"

    @property
    def key(self) -> str:
        """The name of the case in the recorded answers."""
        return f"{self.part} {self.row}: {self.name}"
