"""Classes of models: whether a request may be sent to another server, and whether requests belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATELESS = "stateless"
"""A request may be executed twice: it is sent to another server if a server gives no answer, or 503."""
NO_RETRY = "no_retry"
"""A request is executed once: it goes to another server only if none has received it."""
SEQUENCE = "sequence"
"""As `NO_RETRY`, and requests of a sequence have to reach the same server."""
UNKNOWN = NO_RETRY
"""The class of a model whose configuration is not known yet."""


def model_classes(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the class of each model; ``configs``: configurations in JSON, by name.

    An ensemble has the strictest class of its members. ``parameters { key: "no_retry" value {
    string_value: "true" } }`` marks a model.
    """
    order = (STATELESS, NO_RETRY, SEQUENCE)
    found: dict[str, str] = {}

    def class_of(name: str, above: frozenset[str]) -> str:
        config = configs.get(name)
        if config is None or name in above:
            return UNKNOWN
        if name not in found:
            steps = config.get("ensemble_scheduling", {}).get("step", [])
            members = {class_of(step["model_name"], above | {name}) for step in steps}
            found[name] = max(members | {_own_class(config)}, key=order.index)
        return found[name]

    for name in configs:
        class_of(name, frozenset())
    return found


def _own_class(config: Mapping[str, Any]) -> str:
    if "sequence_batching" in config:
        return SEQUENCE
    mark = config.get("parameters", {}).get("no_retry", {}).get("string_value", "false")
    return NO_RETRY if str(mark).lower() in ("true", "1", "on") else STATELESS
