"""Configuration of a model as plain values: versions, tensors, instances, parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

import orjson

from gpubridge.config.config_json import JsonValue, message_to_triton_json
from gpubridge.errors import invalid, not_found
from gpubridge.flags import documented
from gpubridge.schema import ProtoMessage, enum_name

_VERSION_NAME = re.compile(r"[1-9][0-9]*")
_MAX_VERSION = 2**63 - 1
FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
"""The family of metrics whose buckets a model can configure."""

InstanceKind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]

_NUMBERS = (*(f"{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)), "BF16")
KSERVE_DATATYPES = MappingProxyType(
    {f"TYPE_{name}": name for name in ("BOOL", *_NUMBERS, "FP16", "FP32", "FP64")}
    | {"TYPE_STRING": "BYTES"}
)
"""Names of ``data_type`` in config.pbtxt and the KServe v2 names of the same datatypes."""


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Versions to serve: so many ``latest`` ones, all, or ``specific`` ones."""

    kind: Literal["latest", "all", "specific"]
    latest: int = 0
    versions: tuple[int, ...] = ()


def available_versions(model_dir: Path) -> list[int]:
    """Return the version numbers of `model_dir`, ascending; NOT_FOUND when it cannot be listed.

    A version is a directory whose name is a number from 1 to 2**63 - 1, as Triton documents it.
    """
    try:
        entries = list(model_dir.iterdir())
    except OSError as error:
        raise not_found(f"cannot list the model directory {model_dir}: {error.strerror}") from error
    return sorted(
        int(entry.name)
        for entry in entries
        if _VERSION_NAME.fullmatch(entry.name)
        and int(entry.name) <= _MAX_VERSION
        and entry.is_dir()
    )


def select_versions(policy: VersionPolicy, available: Iterable[int]) -> list[int]:
    """Return the versions of `available` that `policy` serves, ascending; possibly none."""
    ascending = sorted(available)
    if policy.kind == "specific":
        return [version for version in ascending if version in policy.versions]
    if policy.kind == "latest":
        return ascending[max(0, len(ascending) - policy.latest) :]
    return ascending


def served_versions(
    model_dir: Path, model_name: str, policy: VersionPolicy, place: str
) -> list[int]:
    """Return the versions of the model in `model_dir` to load, ascending; INVALID_ARG for none.

    ``place``: where its user would put version 1.
    """
    available = available_versions(model_dir)
    selected = select_versions(policy, available)
    if not selected:
        found = ", ".join(map(str, available)) if available else "none"
        raise invalid(
            "at least one version must be available under the version policy of model "
            f"'{model_name}': put the model's file into a directory such as {place} "
            f"(versions found: {found}; policy: {_policy_text(policy)})"
        )
    return selected


def _policy_text(policy: VersionPolicy) -> str:
    if policy.kind == "latest":
        return f"latest {policy.latest}"
    if policy.kind == "specific":
        return "specific " + (", ".join(map(str, policy.versions)) or "(an empty list)")
    return "all"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    - ``datatype``: the KServe v2 name: ``"FP32"``, ``"BYTES"``, ``"BF16"``, ...
    - ``dims``: as clients see them, without the batch dimension; -1 is variable.
    - ``reshape``: the shape that the model sees instead of `dims`, if configured.
    - ``labels``: names of an output's classes, by index.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None
    allow_ragged_batch: bool = False
    labels: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances of a model on the host, or on *each* GPU of `gpus`."""

    name: str
    count: int
    kind: InstanceKind
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """The complete, validated configuration of one model, with all defaults filled in.

    - ``backend``: ``"python"``, the name of a backend written in Python, or ``""`` for an ensemble.
    - ``max_batch_size``: 0 when the model has no batch dimension.
    - ``parameters``: the ``string_value`` of each parameter.
    - ``decoupled``: the model sends any number of responses per request.
    - ``message``: the protobuf message of the configuration, which must not be changed.
    - ``notices``: log lines about settings without effect.
    - ``backend_file``: the ``model.py`` of its backend; None for a Python model.
    - ``draft``: the model may still complete the configuration when it is loaded. Until then `inputs`
      and `outputs` are empty and unchecked, whatever the message has.
    - ``fallbacks``: number of slower fallbacks by reason: "no_gpu".
    """

    name: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    instance_groups: tuple[InstanceGroup, ...]
    default_model_filename: str
    version_policy: VersionPolicy
    parameters: dict[str, str]
    decoupled: bool
    message: ProtoMessage
    notices: tuple[str, ...] = ()
    backend_file: Path | None = None
    draft: bool = False
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def inputs_by_name(self) -> Mapping[str, TensorSpec]:
        """The inputs by name."""
        return {spec.name: spec for spec in self.inputs}

    @cached_property
    def outputs_by_name(self) -> Mapping[str, TensorSpec]:
        """The outputs by name."""
        return {spec.name: spec for spec in self.outputs}

    @cached_property
    def required_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that are not optional."""
        return tuple(spec.name for spec in self.inputs if not spec.optional)

    @property
    def metric_tags(self) -> dict[str, str]:
        """The labels that the model adds to its metrics."""
        return dict(self.message.metric_tags)

    @property
    def first_response_buckets(self) -> tuple[float, ...]:
        """The bounds, in milliseconds, of the histogram of first responses; empty for the default."""
        for control in self.message.model_metrics.metric_control:
            if control.metric_identifier.family == FIRST_RESPONSE_FAMILY:
                return tuple(control.histogram_options.buckets)
        return ()

    def to_dict(self) -> dict[str, JsonValue]:
        """Return a new JSON object of ``GET /v2/models/{name}/config``."""
        document: dict[str, JsonValue] = orjson.loads(self.to_json())
        return document

    def to_json(self) -> str:
        """Return the cached response to ``GET /v2/models/{name}/config``."""
        return self._json

    @cached_property
    def _json(self) -> str:
        return orjson.dumps(message_to_triton_json(self.message)).decode()

    def to_spaced_json(self) -> str:
        """Return `json.dumps` of `to_dict`, made in pieces so that other threads run between them."""
        members = []
        for name, value in self.to_dict().items():
            entries = value if isinstance(value, list) else [value]
            text = ", ".join([json.dumps(entry) for entry in entries])
            members.append(
                f'"{name}": [{text}]' if isinstance(value, list) else f'"{name}": {text}'
            )
        return "{" + ", ".join(members) + "}"

    def unscheduled(self) -> ModelConfig:
        """Return this configuration without its choice of a scheduler."""
        message = type(self.message)()
        message.CopyFrom(self.message)
        choice = message.WhichOneof("scheduling_choice")
        if choice is not None:
            message.ClearField(choice)
        return replace(self, message=message)

    def with_version_policy(self, other: ModelConfig) -> ModelConfig:
        """Return this configuration with the version policy of another."""
        message = type(self.message)()
        message.CopyFrom(self.message)
        message.version_policy.CopyFrom(other.message.version_policy)
        return replace(self, version_policy=other.version_policy, message=message)


def model_config_from_message(
    message: ProtoMessage,
    notices: tuple[str, ...],
    labels: Mapping[str, tuple[bytes, ...]],
    backend_file: Path | None,
    *,
    on_host: int = 0,
    draft: bool = False,
) -> ModelConfig:
    """Return the configuration of a normalised, valid message; ``labels`` by output."""
    inputs, outputs = ((), ()) if draft else (message.input, message.output)
    return ModelConfig(
        name=message.name,
        backend=message.backend,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_tensor_spec(tensor) for tensor in inputs),
        outputs=tuple(_tensor_spec(tensor, labels.get(tensor.name, ())) for tensor in outputs),
        instance_groups=tuple(_instance_group(group) for group in message.instance_group),
        default_model_filename=message.default_model_filename,
        version_policy=version_policy(message),
        parameters={key: value.string_value for key, value in message.parameters.items()},
        decoupled=message.model_transaction_policy.decoupled,
        message=message,
        notices=notices,
        backend_file=backend_file,
        draft=draft,
        fallbacks={"no_gpu": on_host} if on_host else {},
    )


def _tensor_spec(tensor: ProtoMessage, labels: tuple[bytes, ...] = ()) -> TensorSpec:
    """Return an input or output; only inputs have the optional fields."""
    return TensorSpec(
        name=tensor.name,
        datatype=_datatype(tensor.data_type),
        dims=tuple(tensor.dims),
        optional=getattr(tensor, "optional", False),
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        allow_ragged_batch=getattr(tensor, "allow_ragged_batch", False),
        labels=labels,
    )


def _datatype(number: int) -> str:
    return KSERVE_DATATYPES[enum_name("DataType", number)]


def _instance_group(group: ProtoMessage) -> InstanceGroup:
    kind = enum_name("ModelInstanceGroup.Kind", group.kind)
    return InstanceGroup(
        name=group.name,
        count=group.count,
        kind=cast("InstanceKind", kind),
        gpus=tuple(group.gpus),
    )


def version_policy(message: ProtoMessage) -> VersionPolicy:
    """Return the policy in a normalised message."""
    policy = message.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "latest":
        return VersionPolicy("latest", latest=policy.latest.num_versions)
    if choice == "specific":
        return VersionPolicy("specific", versions=tuple(policy.specific.versions))
    # `version_policy { }` without a choice serves every version, as in Triton.
    return VersionPolicy("all")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Parameters of a model that the server reads; empty if not set.

    A parameter is a field's name in capitals. Other parameters are for the model only.
    """

    execution_env_path: str = documented("", "its Python environment: a directory or an archive")
    force_cpu_only_input_tensors: str = documented(
        "",
        "yes: inputs are copied to the host; no: they stay where they are",
        values=("yes", "no"),
    )
    input_placement: str = documented(
        "",
        "placement of inputs; overrides FORCE_CPU_ONLY_INPUT_TENSORS",
        values=("source", "device", "host"),
    )
    input_sharing: str = documented(
        "",
        "inputs that other models read, too, are read-only views (share) or copies (copy)",
        values=("copy", "share"),
    )
    coroutines: str = documented(
        "",
        "a number: so many coroutines of `execute` run at once in each process, and each request is answered "
        "when its coroutine ends",
    )
    openai: str = documented(
        "",
        "endpoints of OpenAI's API that it serves, separated by commas; see [Speak OpenAI's "
        "API](../how-to/openai.md)",
        values=("chat", "completions", "embeddings"),
        several=True,
    )

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], model: str) -> ModelSettings:
        """Return the settings in the parameters of a model; raises BridgeError for a wrong value."""
        given = {}
        for each in fields(cls):
            name, values = each.name.upper(), each.metadata.get("values")
            if name not in parameters:
                continue
            value = given[each.name] = parameters[name]
            if name == "COROUTINES" and not (value.isdecimal() and 0 < int(value) < 1 << 31):
                raise invalid(
                    f"Incorrect value for {name}: '{value}' in model '{model}', expected a number of at "
                    "least 1"
                )
            chosen = value.split(",") if each.metadata.get("several") else [value]
            if not values or set(chosen) <= set(values):
                continue
            if name == "FORCE_CPU_ONLY_INPUT_TENSORS":
                # Triton's text.
                raise invalid(f"Incorrect value for {name}: {value}'")
            raise invalid(
                f"Incorrect value for {name}: '{value}' in model '{model}', expected one of "
                f"{', '.join(values)}"
            )
        return cls(**given)
