"""The ``parameters`` of a model's config.pbtxt that the server itself reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from gpubridge.errors import invalid
from gpubridge.flags import documented


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Parameters of a model that the server reads; empty where one is not set.

    A parameter is its field's name in capitals. All others are the model's own.
    """

    execution_env_path: str = documented("", "its Python environment: a directory or an archive")
    force_cpu_only_input_tensors: str = documented(
        "",
        "yes: inputs are brought to the host; no: they stay where they are",
        values=("yes", "no"),
    )
    input_placement: str = documented(
        "",
        "where inputs are; it wins over FORCE_CPU_ONLY_INPUT_TENSORS",
        values=("source", "device", "host"),
    )
    input_sharing: str = documented(
        "",
        "inputs that others look at, too, are read-only views (share) or copies (copy)",
        values=("copy", "share"),
    )

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], model: str) -> ModelSettings:
        """Return what the parameters of a model say; raises BridgeError for a wrong value."""
        given = {}
        for each in fields(cls):
            name, values = each.name.upper(), each.metadata.get("values")
            if name not in parameters:
                continue
            value = given[each.name] = parameters[name]
            if not values or value in values:
                continue
            if name == "FORCE_CPU_ONLY_INPUT_TENSORS":
                # Triton's words.
                raise invalid(f"Incorrect value for {name}: {value}'")
            raise invalid(
                f"Incorrect value for {name}: '{value}' in model '{model}', expected one of "
                f"{', '.join(values)}"
            )
        return cls(**given)
