"""Which argument and which result of ``forward`` a tensor's name stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpubridge.backends.model_setup import ModelSetup
from gpubridge.backends.pytorch.program import Forward

__all__ = ["argument_names", "check_output_names", "pick_output"]

_INDEXED = re.compile(r".*__(\d+)")


def argument_names(setup: ModelSetup, forward: Forward) -> dict[str, str]:
    """Return the argument of each of a model's inputs, by the input's name.

    An input is named as an argument is, or ends in ``__`` and the argument's index.

    Raises
    ------
    ValueError
        When an input is no argument, or two are the same one.
    """
    inputs = [*(entry.name for entry in setup.inputs), *setup.control_inputs]
    if forward.takes_dict:
        return {name: name for name in inputs}
    places: dict[str, str] = {}
    for name in inputs:
        argument = _argument(name, forward.arguments)
        if argument in places.values():
            raise ValueError(
                f"input '{name}': expected one input per argument, got another for '{argument}'"
            )
        places[name] = argument
    for entry in setup.inputs:
        strings = places[entry.name] in forward.strings
        if strings != (entry.data_type == "TYPE_STRING"):
            wanted = "TYPE_STRING, for a list of str" if strings else "a tensor"
            raise ValueError(
                f"input '{entry.name}': expected {wanted}, as the argument "
                f"'{places[entry.name]}' of forward is, got {entry.data_type} in config.pbtxt"
            )
        if strings and len(entry.dims) != 1:
            raise ValueError(
                f"input '{entry.name}': expected one dimension, for a list of str, got dims "
                f"{list(entry.dims)}"
            )
    return places


def _argument(name: str, arguments: Sequence[str]) -> str:
    if name in arguments:
        return name
    indexed = _INDEXED.fullmatch(name)
    if indexed and int(indexed[1]) < len(arguments):
        return arguments[int(indexed[1])]
    raise ValueError(
        f"input '{name}': expected the name of an argument of forward ({', '.join(arguments)}) or "
        f"one that ends in __ and its index, such as INPUT__0, up to {len(arguments) - 1}"
    )


def check_output_names(setup: ModelSetup, forward: Forward) -> None:
    """Raise ValueError where an output's name says no place in what ``forward`` returns."""
    if forward.returns_dict or len(setup.outputs) == 1:
        return
    for entry in (*setup.outputs, *setup.state_outputs):
        if not _INDEXED.fullmatch(entry.name):
            raise ValueError(
                f"output '{entry.name}': expected a name that ends in __ and the index in what "
                "forward returns, such as OUTPUT__0"
            )


def pick_output(result: Any, name: str) -> Any:
    """Return what a name stands for in the result of ``forward``.

    Parameters
    ----------
    result : object
        A dict by name, a tuple, or a list; anything else stands for itself.

    Raises
    ------
    ValueError
        When nothing is there.
    """
    if isinstance(result, Mapping):
        if name not in result:
            raise ValueError(
                f"output '{name}': expected a key of what forward returns: {', '.join(result)}"
            )
        return result[name]
    # A list of str is one result, not many.
    several = isinstance(result, (tuple, list)) and not (result and isinstance(result[0], str))
    results = list(result) if several else [result]
    indexed = _INDEXED.fullmatch(name)
    index = int(indexed[1]) if indexed else 0
    if index >= len(results):
        raise ValueError(
            f"output '{name}': expected an index below {len(results)}, which is how much forward "
            "returns"
        )
    return results[index]
