"""Outputs of responses that are not as the configuration has them: Triton lets them pass, in silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from gpubridge.tensor.dtypes import DATATYPES
from gpubridge.transport.signatures import encode_signature

_MOST_WARNINGS = 256
_OF_CONFIG = {entry.config_name: entry.name for entry in DATATYPES.values()}


class OutputCheck:
    """Looks at the first response of each form, and tells of each name once.

    ``warn`` gets a name and a sentence for the log.
    """

    def __init__(self, settings: Mapping[str, Any], warn: Callable[[str, str], None]) -> None:
        config = json.loads(settings["args"]["model_config"])
        batched = int(config.get("max_batch_size", 0) > 0)
        self._warn = warn
        self._decoupled: bool = settings["decoupled"]
        self._names = frozenset(settings["outputs"])
        self._states = {state["output_name"] for state in settings["states"]}
        # Datatype and rank.
        self._forms: dict[str, tuple[str, int]] = {}
        for output in config.get("output", ()):
            dims = output["reshape"].get("shape", ()) if output.get("reshape") else output["dims"]
            datatype = _OF_CONFIG.get(output["data_type"], "")
            self._forms[output["name"]] = datatype, len(dims) + batched
        self._warned: set[str] = set()

    def encode(
        self, described: Sequence[tuple[str, str, int]], wanted: Collection[str] | None
    ) -> bytes:
        """Return the signature of tensors (name, datatype, rank), the first ones of their form.

        ``wanted``: what the request asks for; None where nothing was to be sent.
        """
        for name, datatype, rank in described:
            expected = self._forms.get(name, (datatype, rank))
            if expected != (datatype, rank):
                self._tell(
                    name,
                    f"output '{name}' of a response is {datatype} with {rank} dimensions, the "
                    f"configuration says {expected[0]} with {expected[1]}",
                )
        if wanted is not None and (described or not self._decoupled):
            returned = [name for name, *_ in described]
            for name in self._names.intersection(wanted).difference(returned):
                self._tell(
                    name,
                    f"a response has no output '{name}', which the configuration has; it has "
                    f"{_listed(returned)}",
                )
        return encode_signature(described)

    def dropped(self, name: str) -> None:
        """Look at the name of an output that is not sent."""
        if name not in self._names and name not in self._states:
            self._tell(
                name,
                f"a response has an output '{name}', which nobody gets: the configuration has "
                f"{_listed(sorted(self._names))}",
            )

    def _tell(self, name: str, text: str) -> None:
        if name not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(name)
            self._warn(name, text)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
