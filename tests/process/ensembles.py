"""Ensembles for tests with real servers."""

import json
from pathlib import Path

import numpy as np

from tests.process.model_sources import answering
from tests.process.server import declared, write_code_model, write_model

ADD = answering("return respond(OUT=value + 1)")
# OUT is the sum of its inputs, NUMBER how many there are.
SUM = answering(
    """
arrays = [tensor.as_numpy() for tensor in request.inputs()]
return respond(OUT=sum(arrays), NUMBER=np.array([len(arrays)], np.float32))
"""
)
# Writes to its input if it may; NUMBER is 1 if so.
EDIT = answering(
    """
number = np.array([value.flags.writeable], np.float32)
if value.flags.writeable:
    value *= 2
return respond(OUT=value + 0, NUMBER=number)
"""
)
# What a member sees of a request besides its tensors.
SIGHT = answering(
    """
seen = [request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
        request.parameters(), sorted(request.requested_output_names())]
return respond(OUT=np.array([json.dumps(seen)], object))
"""
)
# A batching model whose output has no batch dimension of its own.
TOTAL = answering("return respond(OUT=value.sum(axis=1))")
TEXT = "STRING [1]"
BATCH = "max_batch_size: 8 dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 10000000 }"


def write_ensemble(
    repository: Path,
    name: str,
    *steps: str,
    inputs: str = "A",
    outputs: str = "B",
    kind: str = "FP32 [-1]",
    tensors: str = "",
    config: str = "",
) -> Path:
    """Write an ensemble; a step is written as ``model IN=A IN2=t > OUT=u``. Returns its directory.

    All its inputs and outputs are of the same ``kind``, unless ``tensors`` says what they are, as for
    `write_model`; a ``?`` after a name makes an input optional. ``config`` is added to its config.pbtxt.
    """
    text = f'platform: "ensemble"\n{config}\n'
    sides = [
        "; ".join(
            f"{word} {kind}".replace("?", "") + " optional: true" * ("?" in word)
            for word in names.split()
        )
        for names in (inputs, outputs)
    ]
    given, _, made = (tensors or " > ".join(sides)).partition(">")
    text += declared("input", given) + declared("output", made)
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


def write_models(repository: Path) -> None:
    """Write many ensembles, and the models that they are made of."""
    _write_members(repository)
    _write_ensembles(repository)


def _write_members(repository: Path) -> None:
    write_model(repository, "add", ADD)
    write_model(repository, "add_batched", ADD, config=BATCH, version=1)
    write_model(repository, "total", TOTAL, config="max_batch_size: 8")
    numbered = "> OUT FP32 [-1]; NUMBER FP32 [1]"
    write_model(
        repository, "sum", SUM, tensors=f"X FP32 [-1]; Y FP32 [-1] optional: true {numbered}"
    )
    write_model(repository, "edit", EDIT, tensors=numbered)
    write_model(repository, "sight", SIGHT, tensors="> OUT STRING [1]")
    write_model(
        repository,
        "steps",
        ADD,
        config="max_batch_size: 4 sequence_batching { }",
        tensors="IN FP32 [1] > OUT FP32 [1]",
    )
    for name in ("code", "other"):
        write_code_model(repository, name)


def _write_ensembles(repository: Path) -> None:
    write_ensemble(
        repository, "edits", "edit IN=A > OUT=t NUMBER=N", "edit IN=t > OUT=B NUMBER=M",
        outputs="B N M",
    )  # fmt: skip
    write_ensemble(
        repository, "edit_shared", "edit IN=A > NUMBER=N", "add IN=A > OUT=B", outputs="A B N"
    )
    write_ensemble(repository, "edit_inside", "edit_shared A=A > A=t", "edit IN=t > NUMBER=B")
    write_ensemble(
        repository, "edit_outside", "chain A=A > B=t", "edits A=t > N=B", "add IN=t > OUT=C",
        outputs="B C",
    )  # fmt: skip
    write_ensemble(repository, "chain", "add IN=A > OUT=t", "add IN=t > OUT=u", "add IN=u > OUT=B")
    write_ensemble(
        repository, "diamond", "add IN=A > OUT=t", "chain A=A > B=u", "sum X=t Y=u > OUT=B"
    )
    write_ensemble(
        repository,
        "fan",
        "add IN=A > OUT=B",
        "sum X=A Y=A > OUT=C",
        outputs="B C A",
    )
    write_ensemble(repository, "option", "sum X=A Y=A2 > NUMBER=B", inputs="A A2?")
    write_ensemble(repository, "batched", "add_batched IN=A > OUT=B", config="max_batch_size: 8")
    write_ensemble(repository, "totals", "total IN=A > OUT=B", config="max_batch_size: 8")
    write_ensemble(repository, "add_one", "add IN=A > OUT=B", config="max_batch_size: 8")
    write_ensemble(
        repository, "total_added", "total IN=A > OUT=t", "add IN=t > OUT=B",
        config="max_batch_size: 8",
    )  # fmt: skip
    write_ensemble(
        repository, "total_refused", "total IN=A > OUT=t", "add_batched IN=t > OUT=B",
        config="max_batch_size: 8",
    )  # fmt: skip
    write_ensemble(repository, "around", "fan A=A > A=t", "add IN=t > OUT=B")
    write_ensemble(
        repository,
        "sequence",
        "steps IN=A > OUT=B",
        kind="FP32 [1]",
        config="max_batch_size: 4",
    )
    write_ensemble(repository, "codes", "code IN=A > OUT=t", "other IN=t > OUT=B", kind=TEXT)
    write_ensemble(
        repository, "sides", "code IN=A > OUT=B", "other IN=A2 > OUT=C", inputs="A A2",
        outputs="B C", kind=TEXT,
    )  # fmt: skip
    write_ensemble(repository, "seen", "sight IN=A > OUT=B", tensors="A FP32 [-1] > B STRING [1]")


def infer(server, model, inputs, **members):
    """Infer with values by name (texts or FP32 arrays); returns the outputs by name, or the error."""
    tensors = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [value]}
        if isinstance(value, str)
        else {
            "name": name,
            "datatype": "FP32",
            "shape": list(np.shape(value)),
            "data": np.ravel(value).tolist(),
        }
        for name, value in inputs.items()
    ]
    body = json.dumps({"inputs": tensors, **members})
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", body)
    document = json.loads(answer)
    if status != 200:
        return status, document["error"]
    return {output["name"]: output["data"] for output in document["outputs"]}
