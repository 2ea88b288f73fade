"""A model's configuration for the backends."""

from __future__ import annotations

import difflib
import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_NEAR = 0.8
"""Similarity from which an unknown key counts as misspelt: other keys may be Triton's."""
_OF_THE_SERVER = (
    "EXECUTION_ENV_PATH",
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    "INPUT_PLACEMENT",
    "INPUT_SHARING",
)
_OPTIMIZATIONS = ("graph", "cuda", "execution_accelerators")
"""Fields of ``optimization`` that backends may use; the server handles the others."""


class Parameters:
    """Texts by key; a ValueError of a reader has the key, the expected form and the given text."""

    def __init__(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._texts = {key: str(entry["string_value"]).strip() for key, entry in entries.items()}
        # Keys that were read, and those that the server reads.
        self._known = set(_OF_THE_SERVER)

    def __contains__(self, key: str) -> bool:
        return self._given(key) is not None

    def _given(self, key: str) -> str | None:
        self._known.add(key)
        return self._texts.get(key)

    def refuse_misspelt(self, backend: str, *, others: bool = False) -> list[str]:
        """Refuse unread keys that resemble a key that was read; ``others``: refuse all unread keys.

        Returns log messages about the other unread keys.
        """
        known = {key.lower(): key for key in self._known}
        sentences = []
        for key in self._texts.keys() - self._known:
            text = f"parameter {key}: the backend '{backend}' has none of that name"
            near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=_NEAR)
            if near:
                raise ValueError(f"{text}; did you mean {known[near[0]]}?")
            if others:
                raise ValueError(f"{text}; it has {', '.join(sorted(self._known))}")
            sentences.append(f"{text}, so it has no effect")
        return sentences

    def text(self, key: str, default: str) -> str:
        """Return the text, or the default."""
        given = self._given(key)
        return default if given is None else given

    def whole_number(self, key: str, default: int, least: int = 1) -> int:
        """Return a decimal number."""
        text = self._given(key)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise _wrong(key, f"a whole number of at least {least}", text)
        return int(text)

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """Return one of the choices, ignoring case."""
        text = self.text(key, default)
        for choice in choices:
            if choice.lower() == text.lower():
                return choice
        raise _wrong(key, f"one of {', '.join(choices)}", text)

    def choices(self, key: str, default: Sequence[str]) -> tuple[str, ...]:
        """Return a non-empty subset of the default's words, given separated by commas."""
        text = self._given(key)
        if text is None:
            return tuple(default)
        words = [word.strip().lower() for word in text.split(",")]
        if not set(words) <= {choice.lower() for choice in default}:
            raise _wrong(key, f"some of {', '.join(default)}", text)
        return tuple(choice for choice in default if choice.lower() in words)

    def share(self, key: str, default: float) -> float:
        """Return a number from 0 to 1."""
        (value,) = self.numbers(key, (default,), "a number from 0 to 1")
        if not 0 <= value <= 1:
            raise _wrong(key, "a number from 0 to 1", self._texts[key])
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return self.choice(key, str(default), ("true", "false")) == "true"

    def numbers(self, key: str, default: Sequence[float], what: str) -> tuple[float, ...]:
        """Return as many finite numbers, separated by commas, as the default has; `what` names them."""
        text = self._given(key)
        if text is None:
            return tuple(default)
        try:
            values = tuple(float(number) for number in text.split(","))
        except ValueError:
            values = ()
        if len(values) != len(default) or not all(map(math.isfinite, values)):
            raise _wrong(key, what, text)
        return values


def _wrong(key: str, expected: str, got: str) -> ValueError:
    return ValueError(f"parameter {key}: expected {expected}, got '{got}'")


def import_library(module: str, requirement: str, backend: str) -> ModuleType:
    """Import a module that the backend needs; an ImportError has the command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"the backend '{backend}' needs {module}, and {sys.executable} cannot import it "
            f"({error}); install it there: {sys.executable} -m pip install {requirement}"
        ) from error


@dataclass(frozen=True)
class TensorSetup:
    """An input or output of the configuration; ``data_type`` is ``TYPE_FP32``, ...

    ``dims`` are the model's (after ``reshape``), without the batch dimension; -1 is variable.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> TensorSetup:
        """Read an element of ``input`` or ``output``."""
        reshape = entry.get("reshape")
        dims = entry["dims"] if reshape is None else reshape.get("shape", ())
        return cls(
            entry["name"],
            entry["data_type"],
            tuple(int(dim) for dim in dims),
            bool(entry.get("optional", False)),
        )

    def to_config(self) -> dict[str, Any]:
        """Return the dict for ``ModelConfig.add_input`` and ``add_output``."""
        return {"name": self.name, "data_type": self.data_type, "dims": list(self.dims) or [1]}

    def add_to(self, config: Any, kind: str) -> None:
        """Add this ``input`` or ``output`` to a `ModelConfig`.

        Without dims, for a tensor that has the batch's dimension alone, clients have one dim of 1.
        """
        getattr(config, f"add_{kind}")(self.to_config())
        if not self.dims:
            # The methods for models know no reshape, as in Triton.
            for entry in config.as_dict()[kind]:
                if entry["name"] == self.name:
                    entry["reshape"] = {"shape": []}


@dataclass(frozen=True)
class ModelSetup:
    """Configuration of a model and one of its instances.

    - ``max_batch_size``: 0 when the model has no batch dimension.
    - ``control_inputs``: inputs that the server adds: a sequence's controls and states.
    - ``state_outputs``: outputs for the server alone: a sequence's states.
    - ``gpu``: the device of a KIND_GPU instance.
    - ``threads``: the instance's share of the processors.
    """

    name: str
    max_batch_size: int
    inputs: tuple[TensorSetup, ...]
    outputs: tuple[TensorSetup, ...]
    control_inputs: tuple[str, ...]
    state_outputs: tuple[TensorSetup, ...]
    filename: str
    parameters: Parameters
    config: Mapping[str, Any]
    gpu: int | None
    threads: int

    def model_file(self, version_dir: str) -> Path:
        """Return the model's file, which may be in a directory of the same name."""
        path = Path(version_dir) / self.filename
        if path.is_dir():
            path /= self.filename
        if not path.is_file():
            raise FileNotFoundError(
                f"expected the file of model '{self.name}' at {path}, got none there; put it "
                "there, or name it with default_model_filename"
            )
        return path

    def unused_optimizations(self, used: Sequence[str] = ()) -> list[str]:
        """Return log messages about fields of ``optimization`` that are not ``used``."""
        asked = self.config.get("optimization", {})
        return [
            f"model '{self.name}': optimization.{field} has no effect on the backend "
            f"'{self.config['backend']}'"
            for field in _OPTIMIZATIONS
            if asked.get(field) and field not in used
        ]

    @classmethod
    def from_args(cls, args: Mapping[str, str]) -> ModelSetup:
        """Read the arguments of ``initialize``; ValueError for a decoupled model."""
        gpu = (
            int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        )
        return cls.from_config(json.loads(args["model_config"]), gpu)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], gpu: int | None = None) -> ModelSetup:
        """Read a parsed configuration; see `from_args`."""
        name = config["name"]
        if config.get("model_transaction_policy", {}).get("decoupled", False):
            raise ValueError(
                f"model '{name}': the backend '{config['backend']}' answers each request once; "
                "expected no model_transaction_policy { decoupled: true }"
            )
        sequences = config.get("sequence_batching", {})
        states = sequences.get("state", ())
        controls = sequences.get("control_input", ())
        groups = config.get("instance_group", ())
        instances = sum(group["count"] * max(1, len(group.get("gpus", ()))) for group in groups)
        return cls(
            name=name,
            max_batch_size=config.get("max_batch_size", 0),
            inputs=tuple(TensorSetup.from_config(entry) for entry in config.get("input", ())),
            outputs=tuple(TensorSetup.from_config(entry) for entry in config.get("output", ())),
            control_inputs=(
                *(control["name"] for control in controls),
                *(state["input_name"] for state in states),
            ),
            state_outputs=tuple(
                TensorSetup.from_config({**state, "name": state["output_name"]}) for state in states
            ),
            filename=config.get("default_model_filename", ""),
            parameters=Parameters(config.get("parameters", {})),
            config=config,
            gpu=gpu,
            threads=max(1, len(os.sched_getaffinity(0)) // max(1, instances)),
        )
