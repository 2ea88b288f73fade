"""Ensembles for tests with real servers."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_ensemble"]


def write_ensemble(
    repository: Path,
    name: str,
    *steps: str,
    inputs: str = "A",
    outputs: str = "B",
    kind: str = "data_type: TYPE_FP32 dims: [-1]",
    config: str = "",
) -> Path:
    """Write an ensemble; a step is written as ``model IN=A IN2=t > OUT=u``. Returns its directory.

    All its inputs and outputs are of the same ``kind``; a ``?`` after a name makes an input optional.
    ``config`` is added to its config.pbtxt.
    """
    text = f'platform: "ensemble"\n{config}\n'
    for field, names in (("input", inputs), ("output", outputs)):
        for word in names.split():
            optional = "optional: true" if word.endswith("?") else ""
            text += f'{field} [{{ name: "{word.rstrip("?")}" {kind} {optional} }}]\n'
    text += "ensemble_scheduling {\n"
    for step in steps:
        before, _, after = step.partition(">")
        model, *reads = before.split()
        member, _, version = model.partition(":")
        text += f'step {{ model_name: "{member}" model_version: {version or -1}\n'
        for way, maps in (("input", reads), ("output", after.split())):
            for entry in maps:
                key, _, value = entry.partition("=")
                text += f'{way}_map {{ key: "{key}" value: "{value}" }}\n'
        text += "}\n"
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(text + "}\n")
    return directory
