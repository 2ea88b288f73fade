"""A TorchScript module or an exported program: how it is loaded, and what its forward takes."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Forward", "load_forward"]


@dataclass(frozen=True)
class Forward:
    """Something that can be called, and what it is called with.

    Attributes
    ----------
    module : callable
    arguments : tuple of str
        Names, in order.
    keywords : frozenset of str
        Those that can only be given by name.
    strings : frozenset of str
        Those that are lists of str.
    takes_dict : bool
        The only argument is a dict of tensors by name.
    returns_dict : bool or None
        Whether it returns one; None where that is not known before.
    """

    module: Any
    arguments: tuple[str, ...]
    keywords: frozenset[str] = frozenset()
    strings: frozenset[str] = frozenset()
    takes_dict: bool = False
    returns_dict: bool | None = None


def load_forward(torch: Any, path: Path, device: Any) -> Forward:
    """Load a model's file; nothing is unpickled but what these formats contain.

    Raises
    ------
    ValueError
        When the file is of neither kind; says what it is, and how to make one.
    """
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
    # By its path, PyTorch would want another ending than Triton's model.pt.
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
