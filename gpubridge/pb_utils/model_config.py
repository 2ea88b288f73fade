"""The configuration that ``auto_complete_config`` of a model fills in."""

from __future__ import annotations

import json
from typing import Any


class ModelConfig:
    """A model configuration that may be completed, but not contradicted.

    Parameters
    ----------
    model_config : str
        The configuration as JSON.

    Raises
    ------
    ValueError
        From every method, where what a model provides is malformed or contradicts the
        configuration.
    """

    __module__ = "triton_python_backend_utils"

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Give the configuration itself."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch; never smaller than what is configured."""
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in "
                f"auto-complete-config function for model '{self._name()}' specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Choose the dynamic batcher, with its defaults unless it is configured."""
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but "
                    f"auto-complete-config function for model '{self._name()}' tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Add an input, or complete the one of that name.

        Parameters
        ----------
        input : dict
            ``name``, ``data_type``, ``dims`` and, if wanted, ``optional``.
        """
        self._add(
            "input",
            input,
            ("name", "data_type", "dims", "optional"),
            "'name', 'data_type', 'dims' and 'optional'",
        )

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or complete the one of that name.

        Parameters
        ----------
        output : dict
            ``name``, ``data_type`` and ``dims``.
        """
        self._add("output", output, ("name", "data_type", "dims"), "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Say whether the model is decoupled.

        Parameters
        ----------
        transaction_policy_dict : dict
            ``decoupled`` and nothing else.
        """
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name()}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._name()}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    def _name(self) -> str:
        return str(self._model_config["name"])

    def _add(self, kind: str, entry: dict[str, Any], allowed: tuple[str, ...], listed: str) -> None:
        where = f"in auto-complete-config function for model '{self._name()}'"
        if "name" not in entry:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        name = entry["name"]
        if any(key not in allowed for key in entry):
            raise ValueError(f"{kind} '{name}' {where} contains property other than {listed}.")
        for required in ("data_type", "dims"):
            if required not in entry:
                raise ValueError(f"{kind} '{name}' {where} is missing '{required}' property.")
        configured = self._model_config.setdefault(kind, [])
        for present in configured:
            if present["name"] == name:
                self._complete(kind, present, entry)
                return
        configured.append(dict(entry))

    def _complete(self, kind: str, present: dict[str, Any], entry: dict[str, Any]) -> None:
        name, model = entry["name"], self._name()
        data_type = present.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", entry["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {data_type} for "
                f"{kind} '{name}', model provides {entry['data_type']}"
            )
        specified = f"model '{model}', tensor '{name}': the model expects"
        dims = present.get("dims")
        if dims and dims != entry["dims"]:
            raise ValueError(
                f"{specified} dims {entry['dims']} but the model configuration specifies dims "
                f"{dims}"
            )
        optional = present.get("optional")
        if "optional" in entry and optional not in (None, entry["optional"]):
            raise ValueError(
                f"{specified} optional {entry['optional']} but the model configuration specifies "
                f"optional {optional}"
            )
        present.update(entry)
