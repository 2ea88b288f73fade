"""Loading of a TorchScript module or an exported program, and the arguments of its forward."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubridge.backends.model_setup import ModelSetup

_INDEXED = re.compile(r".*__(\d+)")


@dataclass(frozen=True)
class Forward:
    """A callable with ``arguments``, of which ``keywords`` are passed by name.

    - ``strings``: the arguments that are lists of str.
    - ``takes_dict``: the only argument is a dict of tensors by name.
    - ``returns_dict``: whether it returns a dict; None if unknown before the call.
    """

    module: Any
    arguments: tuple[str, ...]
    keywords: frozenset[str] = frozenset()
    strings: frozenset[str] = frozenset()
    takes_dict: bool = False
    returns_dict: bool | None = None


def load_forward(torch: Any, path: Path, device: Any) -> Forward:
    """Load a model's file without unpickling others; a ValueError says how to make one."""
    if not zipfile.is_zipfile(path):
        raise ValueError(_unusable(path, "is no archive of PyTorch"))
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
        exported = any(
            name.endswith("serialized_exported_program.json") for name in archive.namelist()
        )
    if any(name.startswith("code/") for name in names):
        return _script(torch, path, device)
    if exported or any(name.startswith("models/") for name in names):
        return _exported(torch, path, device)
    raise ValueError(_unusable(path, "is what torch.save makes of weights or a pickled module"))


def _unusable(path: Path, what: str) -> str:
    return (
        f"expected {path} to be a TorchScript module (torch.jit.script or trace, then save) or an "
        f"exported program (torch.export.save), got a file that {what}"
    )


def _script(torch: Any, path: Path, device: Any) -> Forward:
    module = torch.jit.load(str(path), map_location=device)
    module.eval()
    schema = module.forward.schema
    arguments = list(schema.arguments)[1:]
    kinds = {each.name: each.type for each in arguments}
    returned = [each.type.kind() for each in schema.returns]
    return Forward(
        module,
        tuple(kinds),
        strings=frozenset(name for name, kind in kinds.items() if str(kind) == "List[str]"),
        takes_dict=[kind.kind() for kind in kinds.values()] == ["DictType"],
        returns_dict=returned == ["DictType"],
    )


def _exported(torch: Any, path: Path, device: Any) -> Forward:
    # Given a path, PyTorch expects another ending than that of Triton's model.pt.
    with path.open("rb") as file:
        program = torch.export.load(file)
    if device.type != "cpu":
        program = torch.export.passes.move_to_device_pass(program, device)
    names = [str(name) for name in program.graph_signature.user_inputs]
    positional, keywords = program.call_spec.in_spec.unflatten(range(len(names)))
    if not all(isinstance(each, int) for each in (*positional, *keywords.values())):
        raise ValueError(
            f"{path}: expected a program whose forward takes tensors, got one that takes lists, "
            f"tuples or dicts of them: {program.call_spec.in_spec}"
        )
    outputs = program.call_spec.out_spec
    returned = outputs.unflatten(range(outputs.num_leaves))
    return Forward(
        program.module(),
        (*(names[i] for i in positional), *keywords),
        keywords=frozenset(keywords),
        returns_dict=isinstance(returned, dict),
    )


def argument_names(setup: ModelSetup, forward: Forward) -> dict[str, str]:
    """Return the argument for each input: the one of the same name, or of the index in its name.

    Raises ValueError if an input has no argument, or two inputs have the same one.
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
    """Raise ValueError if an output's name has no index into the result of ``forward``."""
    if forward.returns_dict or len(setup.outputs) == 1:
        return
    for entry in (*setup.outputs, *setup.state_outputs):
        if not _INDEXED.fullmatch(entry.name):
            raise ValueError(
                f"output '{entry.name}': expected a name that ends in __ and the index in what "
                "forward returns, such as OUTPUT__0"
            )


def pick_output(result: Any, name: str) -> Any:
    """Return the element of the result of ``forward`` for an output's name; may raise ValueError."""
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
