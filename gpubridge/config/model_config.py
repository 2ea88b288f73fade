"""Configuration of a model, read from its ``config.pbtxt``, as plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

import orjson

from gpubridge.config.schema import (
    JsonValue,
    ProtoMessage,
    message_to_triton_json,
    model_config_schema,
)
from gpubridge.errors import invalid, not_found

_VERSION_NAME = re.compile(r"[1-9][0-9]*")
_MAX_VERSION = 2**63 - 1
FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
"""The one family of metrics whose buckets a model chooses."""

InstanceKind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]

_NUMBERS = (*(f"{kind}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)), "BF16")
KSERVE_DATATYPES = MappingProxyType(
    {f"TYPE_{name}": name for name in ("BOOL", *_NUMBERS, "FP16", "FP32", "FP64")}
    | {"TYPE_STRING": "BYTES"}
)
"""Names of ``data_type`` in config.pbtxt and the KServe v2 names of the same datatypes."""


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Serves so many of the ``latest`` versions, all of them, or ``specific`` ones that exist."""

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
    """Return those of `available` that `policy` serves, ascending; possibly none."""
    ascending = sorted(available)
    if policy.kind == "specific":
        return [version for version in ascending if version in policy.versions]
    if policy.kind == "latest":
        return ascending[max(0, len(ascending) - policy.latest) :]
    return ascending


def served_versions(model_dir: Path, model_name: str, policy: VersionPolicy) -> list[int]:
    """Return the versions of the model in `model_dir` to load, ascending; INVALID_ARG for none."""
    available = available_versions(model_dir)
    selected = select_versions(policy, available)
    if not selected:
        found = ", ".join(map(str, available)) if available else "none"
        raise invalid(
            "at least one version must be available under the version policy of model "
            f"'{model_name}': put the model's file into a directory such as {model_dir / '1'} "
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
    - ``dims``: as clients see it, without the batch dimension; -1 is variable.
    - ``reshape``: the shape the model sees instead of `dims`; None where it sees `dims`.
    - ``labels``: what the file that names an output's classes says, by class index.
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
    """`count` instances of a model on the host, or on *each* GPU of `gpus`; of a settled kind."""

    name: str
    count: int
    kind: InstanceKind
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ModelConfig:
    """The complete, validated configuration of one model, with all defaults filled in.

    - ``backend``: ``"python"``, the name of one that is written in Python, or ``""`` for an
      ensemble.
    - ``max_batch_size``: 0 when the model has no batch dimension.
    - ``parameters``: the ``string_value`` of each parameter.
    - ``decoupled``: the model sends any number of responses per request.
    - ``first_response_buckets``: the bounds, in milliseconds, of the histogram of first responses;
      empty for the usual ones.
    - ``message``: the protobuf all of this came from. Shared: nobody changes it.
    - ``notices``: sentences for the log: what the configuration asks for that has no effect here.
    - ``backend_file``: the ``model.py`` of its backend; None where the model brings its own.
    - ``draft``: the model itself may still complete it, when it is loaded. Until then `inputs` and
      `outputs` are empty, whatever the message has, and nobody has checked that.
    - ``fallbacks``: how much of it is served in a slower way than it asks for, by reason: "no_gpu".
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
    metric_tags: dict[str, str]
    first_response_buckets: tuple[float, ...]
    message: ProtoMessage
    notices: tuple[str, ...] = ()
    backend_file: Path | None = None
    draft: bool = False
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    inputs_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False)
    outputs_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False)
    required_inputs: tuple[str, ...] = field(init=False, repr=False)
    _json: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        required = tuple(spec.name for spec in self.inputs if not spec.optional)
        object.__setattr__(self, "inputs_by_name", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "outputs_by_name", {spec.name: spec for spec in self.outputs})
        object.__setattr__(self, "required_inputs", required)

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the JSON object of ``GET /v2/models/{name}/config``, made anew by each call."""
        document: dict[str, JsonValue] = orjson.loads(self.to_json())
        return document

    def to_json(self) -> str:
        """Return the answer to ``GET /v2/models/{name}/config``, made once: of thousands of tensors slowly."""
        text = self._json
        if text is None:
            text = orjson.dumps(message_to_triton_json(self.message)).decode()
            object.__setattr__(self, "_json", text)
        return text

    def to_spaced_json(self) -> str:
        """Return what `json.dumps` makes of `to_dict`, a piece at a time: others get to run between them."""
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
    """Return the values of a message that is normalised and valid; ``labels`` by output."""
    inputs, outputs = ((), ()) if draft else (message.input, message.output)
    return ModelConfig(
        name=message.name,
        backend=message.backend,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_tensor_spec(tensor) for tensor in inputs),
        outputs=tuple(_tensor_spec(tensor, labels.get(tensor.name, ())) for tensor in outputs),
        instance_groups=tuple(_instance_group(group) for group in message.instance_group),
        default_model_filename=message.default_model_filename,
        version_policy=_version_policy(message.version_policy),
        parameters={key: value.string_value for key, value in message.parameters.items()},
        decoupled=message.model_transaction_policy.decoupled,
        metric_tags=dict(message.metric_tags),
        first_response_buckets=_first_response_buckets(message),
        message=message,
        notices=notices,
        backend_file=backend_file,
        draft=draft,
        fallbacks={"no_gpu": on_host} if on_host else {},
    )


def _tensor_spec(tensor: ProtoMessage, labels: tuple[bytes, ...] = ()) -> TensorSpec:
    """Return the values of an input or output; only inputs have the optional ones."""
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
    return KSERVE_DATATYPES[model_config_schema().DataType.Name(number)]


def _instance_group(group: ProtoMessage) -> InstanceGroup:
    kind = model_config_schema().ModelInstanceGroup.Kind.Name(group.kind)
    return InstanceGroup(
        name=group.name,
        count=group.count,
        kind=cast("InstanceKind", kind),
        gpus=tuple(group.gpus),
    )


def _first_response_buckets(message: ProtoMessage) -> tuple[float, ...]:
    for control in message.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE_FAMILY:
            return tuple(control.histogram_options.buckets)
    return ()


def _version_policy(policy: ProtoMessage) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "latest":
        return VersionPolicy("latest", latest=policy.latest.num_versions)
    if choice == "specific":
        return VersionPolicy("specific", versions=tuple(policy.specific.versions))
    # `version_policy { }` without a choice serves every version, as in Triton.
    return VersionPolicy("all")
