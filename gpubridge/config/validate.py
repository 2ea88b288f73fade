"""Validation of a model configuration whose defaults are filled in.

Errors have the text of Triton 2.51 if it refuses the same; configurations that it accepts although they
cannot work are refused with texts of our own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from math import prod
from pathlib import PurePosixPath

from google.protobuf.message import Message  # type: ignore[import-untyped]

from gpubridge.config.model_config import (
    FIRST_RESPONSE_FAMILY,
    KSERVE_DATATYPES,
    ModelConfig,
    ModelSettings,
)
from gpubridge.errors import invalid
from gpubridge.schema import ProtoMessage, enum_name

_CHECKED_ENUMERATIONS = frozenset(
    {
        "inference.ModelInput.data_type",
        "inference.ModelOutput.data_type",
        "inference.ModelInstanceGroup.kind",
        "inference.ModelSequenceBatching.Control.data_type",
        "inference.ModelSequenceBatching.State.data_type",
        "inference.ModelWarmup.Input.data_type",
    }
)
_PYTHON_RUNTIMES = ("", "libtriton_python.so")
_BACKEND_RUNTIMES = ("", "model.py")

_GROUP_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{0,1024}")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_MOST_PARAMETERS = 10_000
_MOST_SEQUENCES = 1_000_000
_MOST_WARMUPS = 100_000

# Top-level fields that are not served; empty ones are ignored.
_FIELDS = {
    "batch_input": "no batch inputs are made",
    "batch_output": "outputs are not scattered",
}
_UNLIMITED = "its instances run as they become free, without limits"
_ON_THE_HOST = "; --gpu-fallback=host runs such instances on the CPU"
_IGNORED_FIELDS = {
    "model_operations": "no operation libraries are loaded",
    "cc_model_filenames": "one model file is used on every GPU",
}


def check_enumerations(message: ProtoMessage, path: str = "") -> None:
    """Raise ``BridgeError(INVALID_ARG)`` for a number that its enumeration has no name for.

    Those of data types and of instances are left to the checks of these.
    """
    for field, value in message.ListFields():
        here = f"{path}{field.name}"
        values = value if isinstance(value, MutableSequence) else [value]
        if isinstance(value, MutableMapping):
            values = [value[key] for key in value]
        for each in values:
            if isinstance(each, Message):
                check_enumerations(each, f"{here}.")
            elif field.enum_type is not None and field.full_name not in _CHECKED_ENUMERATIONS:
                known = field.enum_type.values_by_number
                if each not in known:
                    names = ", ".join(known[number].name for number in sorted(known))
                    raise invalid(f"{here}: expected one of {names}, got the number {each}")


def validate_model(config: ProtoMessage, *, draft: bool = False) -> None:
    """Raise ``BridgeError(INVALID_ARG)`` for the first error in `config`.

    The inputs and outputs of a ``draft`` are not checked: its model may still complete them.
    """
    if config.max_batch_size < 0:
        raise invalid(f"'max_batch_size' must be non-negative value for {config.name}")
    if not draft:
        _validate_tensors(config, "input", config.input)
        _validate_tensors(config, "output", config.output)
    _validate_counts(config)
    _validate_metrics(config)
    _validate_scheduling(config)
    _validate_sequence_tensors(config)
    if config.platform != "ensemble":
        _validate_execution(config)


def validate_instances(config: ProtoMessage, gpu_count: Callable[[], int]) -> None:
    """Raise ``BridgeError(INVALID_ARG)`` for what this server or machine cannot run."""
    own = _PYTHON_RUNTIMES if config.backend == "python" else _BACKEND_RUNTIMES
    if config.runtime not in own:
        raise invalid(
            f"unable to find backend library '{config.runtime}' for model '{config.name}': "
            "this server runs Python models itself; remove the field 'runtime'"
        )
    for group in config.instance_group:
        _validate_instance_group(config, group, gpu_count)


def _validate_sequence_tensors(config: ProtoMessage) -> None:
    """Refuse two inputs of one name, of which the model would find only one."""
    sequence = config.sequence_batching
    origins = {tensor.name: "an input of clients" for tensor in config.input}
    added = [(tensor.name, "a control input") for tensor in sequence.control_input]
    added += [(state.input_name, "a state") for state in sequence.state]
    for name, origin in added:
        if origins.setdefault(name, origin) != origin:
            raise invalid(
                f"model input '{name}' of {config.name}: expected one source, got {origins[name]} and "
                f"{origin}; give one of them another name"
            )


def _validate_counts(config: ProtoMessage) -> None:
    """Refuse counts that would need excessive memory or time."""
    counts = [("parameters", len(config.parameters), _MOST_PARAMETERS)]
    if config.HasField("sequence_batching"):
        candidates = config.sequence_batching.oldest.max_candidate_sequences
        counts.append(("max_candidate_sequences", candidates, _MOST_SEQUENCES))
        counts.append(("max_batch_size of sequences", config.max_batch_size, _MOST_SEQUENCES))
    counts += [
        (f"count of warmup sample '{sample.name}'", sample.count, _MOST_WARMUPS)
        for sample in config.model_warmup
    ]
    for what, count, most in counts:
        if count > most:
            raise invalid(f"{what} of model '{config.name}': expected at most {most}, got {count}")


def _validate_tensors(config: ProtoMessage, direction: str, tensors: ProtoMessage) -> None:
    names: set[str] = set()
    for tensor in tensors:
        _validate_tensor(config, direction, tensor)
        if tensor.name in names:
            raise invalid(
                f"model {direction} '{tensor.name}' is declared more than once for {config.name}, "
                f"in different ways; every {direction} needs a name of its own"
            )
        names.add(tensor.name)


def _validate_tensor(config: ProtoMessage, direction: str, tensor: ProtoMessage) -> None:
    what, model = f"model {direction} '{tensor.name}'", config.name
    if not tensor.name:
        raise invalid(f"model {direction} must specify 'name' for {model}")
    datatype = enum_name("DataType", tensor.data_type)
    if datatype == "TYPE_INVALID":
        raise invalid(f"{what} must specify 'data_type' for {model}")
    if datatype not in KSERVE_DATATYPES:
        raise invalid(f"{what} has unknown 'data_type' {tensor.data_type} for {model}")
    if not tensor.dims:
        raise invalid(f"{what} must specify 'dims' for {model}")
    if not all(dim >= 1 or dim == -1 for dim in tensor.dims):
        raise invalid(
            f"{what} dimension must be integer >= 1, or -1 to indicate a variable-size dimension "
            f"for {model}"
        )
    if tensor.HasField("reshape"):
        _validate_reshape(config, what, tensor)
    if tensor.is_shape_tensor:
        raise invalid(f"shape tensors are only supported for TensorRT platform for {model}")
    if tensor.is_non_linear_format_io:
        raise invalid(
            f"Non-linear IO format is only supported for the TensorRT platform for {model}"
        )
    if direction == "input" and tensor.format != tensor.FORMAT_NONE and len(tensor.dims) != 3:
        raise invalid(f"model input NHWC/NCHW require 3 dims for {model}")


def _validate_reshape(config: ProtoMessage, what: str, tensor: ProtoMessage) -> None:
    shape = tensor.reshape.shape
    if config.max_batch_size == 0 and not shape:
        raise invalid(
            f"{what} cannot have empty reshape for non-batching model as scalar tensors are not "
            f"supported for {config.name}"
        )
    if not all(dim >= 1 or dim == -1 for dim in shape):
        raise invalid(
            f"{what} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size "
            f"dimension for {config.name}"
        )
    sizes, reshaped = _fixed_sizes(tensor.dims), _fixed_sizes(shape)
    if len(sizes) != len(reshaped) and min(len(sizes), len(reshaped)) > 1:
        raise invalid(
            f"{what} has different number of variable-size dimensions for dims and reshape for "
            f"{config.name}"
        )
    if sizes != reshaped:
        raise invalid(f"{what} has different size for dims and reshape for {config.name}")


def _fixed_sizes(dims: ProtoMessage) -> list[int]:
    """Return the element counts before, between and after dims of -1, which a reshape must keep."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _validate_metrics(config: ProtoMessage) -> None:
    for name in config.metric_tags:
        # Other keys would make the metrics page malformed.
        if not _LABEL_NAME.fullmatch(name):
            raise invalid(
                f"metric_tags of model {config.name}: expected a key of letters, digits and "
                f"underscores that begins with no digit, got {name[:40]!a}"
            )
    for control in config.model_metrics.metric_control:
        family, buckets = control.metric_identifier.family, list(control.histogram_options.buckets)
        if family != FIRST_RESPONSE_FAMILY:
            raise invalid(
                f"model_metrics of model {config.name}: expected the family "
                f"'{FIRST_RESPONSE_FAMILY}', whose buckets are the only ones to choose, got "
                f"'{family}'"
            )
        if buckets != sorted(set(buckets)):
            raise invalid(
                f"model_metrics of model {config.name}: expected buckets in ascending order, got "
                f"{buckets}"
            )


def _validate_scheduling(config: ProtoMessage) -> None:
    scheduling = config.WhichOneof("scheduling_choice")
    if scheduling == "ensemble_scheduling":
        _validate_ensemble(config)
    elif config.platform == "ensemble":
        raise invalid(
            f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble"
        )
    elif scheduling == "dynamic_batching":
        _validate_preferred_sizes(config, "dynamic", config.dynamic_batching)
        _validate_priorities(config)
    elif scheduling == "sequence_batching" and config.sequence_batching.HasField("oldest"):
        _validate_preferred_sizes(config, "sequence", config.sequence_batching.oldest)
    if config.response_cache.enable:
        decoupled = config.model_transaction_policy.decoupled
        if decoupled or scheduling == "sequence_batching":
            kind = "'decoupled' transaction policy" if decoupled else "sequence batching scheduler"
            raise invalid(
                f"Response Cache does not currently support model {config.name} with {kind}. Please "
                "disable the response cache."
            )


def _validate_ensemble(config: ProtoMessage) -> None:
    name = config.name
    if config.platform != "ensemble":
        raise invalid(
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
        )
    if config.backend:
        raise invalid(
            f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type"
        )
    if config.instance_group:
        raise invalid(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise invalid(f"optimization should not be specified for ensemble '{name}'")
    if not config.ensemble_scheduling.step:
        raise invalid(f"must specify 'step' for ensemble '{name}'")
    if config.model_warmup:
        raise invalid(f"model_warmup can not be specified for ensemble '{name}'")


def _validate_preferred_sizes(config: ProtoMessage, batcher: str, settings: ProtoMessage) -> None:
    for size in settings.preferred_batch_size:
        if size <= 0:
            raise invalid(f"{batcher} batching preferred size must be positive for {config.name}")
        if size > config.max_batch_size:
            # Triton's texts differ here.
            subject = "preferred batch size" if batcher == "sequence" else "preferred size"
            raise invalid(
                f"{batcher} batching {subject} must be <= max batch size for {config.name}"
            )


def _validate_priorities(config: ProtoMessage) -> None:
    batching = config.dynamic_batching
    levels = batching.priority_levels
    if levels == 0:
        return
    if not 1 <= batching.default_priority_level <= levels:
        raise invalid(f"default priority level must be in range [1, {levels}] for {config.name}")
    if not all(1 <= level <= levels for level in batching.priority_queue_policy):
        raise invalid(
            f"priority queue policy must have priority level in range [1, {levels}] "
            f"for {config.name}"
        )


def _validate_execution(config: ProtoMessage) -> None:
    filename = PurePosixPath(config.default_model_filename)
    if filename.is_absolute() or ".." in filename.parts:
        raise invalid(
            f"default_model_filename '{filename}' of model '{config.name}' leads out of the "
            "version directory; give a path inside it, such as model.py"
        )
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    ModelSettings.from_parameters(parameters, config.name)


def _validate_instance_group(
    config: ProtoMessage, group: ProtoMessage, gpu_count: Callable[[], int]
) -> None:
    kind = enum_name("ModelInstanceGroup.Kind", group.kind)
    if not _GROUP_NAME.fullmatch(group.name):
        raise invalid(
            f"instance group {group.name[:40]!a} of model {config.name}: expected a name of at "
            "most 1024 characters, none of them a control character"
        )
    where = f"instance group {group.name} of model {config.name}"
    if not kind:
        raise invalid(f"{where} has unexpected kind {group.kind}")
    if group.count < 1:
        raise invalid(f"{where} has count {group.count}; expected at least 1")
    if group.profile:
        raise invalid(
            f"{where} and platform specifies profile field which is only supported for TensorRT "
            "models"
        )
    if kind != "KIND_GPU":
        if group.gpus:
            raise invalid(f"{where} has kind {kind} but specifies one or more GPUs")
        return
    if not group.gpus:
        raise invalid(f"{where} has kind KIND_GPU but no GPUs are available{_ON_THE_HOST}")
    count = gpu_count()
    for gpu in group.gpus:
        if not 0 <= gpu < count:
            existing = ", ".join(map(str, range(count))) or "none"
            raise invalid(
                f"{where} specifies invalid or unsupported gpu id {gpu}. GPUs of this machine are: "
                f"{existing}{'' if count else _ON_THE_HOST}"
            )


def ignored_features(config: ProtoMessage) -> list[str]:
    """Return a notice for each field that Triton accepts, too, and uses only with certain flags."""
    present = {field.name for field, _ in config.ListFields()}
    ignored = [(name, text) for name, text in _IGNORED_FIELDS.items() if name in present]
    ignored += [
        (f"instance_group '{group.name}' rate_limiter", _UNLIMITED)
        for group in config.instance_group
        if group.HasField("rate_limiter")
    ]
    return [
        f"model '{config.name}': the field '{field}' has no effect: {instead}"
        for field, instead in ignored
    ]


def unsupported_features(config: ModelConfig, *, rate_limited: bool = False) -> list[str]:
    """Return a sentence for each unsupported feature in `config`, with the behaviour instead.

    The caller decides whether to refuse the model. ``rate_limited``: a flag asks for rate limits.
    """
    unsupported = [*_unsupported_fields(config.message)]
    unsupported += [
        (
            f"instance_group '{group.name}' rate_limiter",
            f"{_UNLIMITED}, and --rate-limit asks for it",
        )
        for group in config.message.instance_group
        if rate_limited and group.HasField("rate_limiter")
    ]
    return [
        f"model '{config.name}': the field '{field}' is not supported yet: {instead}"
        for field, instead in unsupported
    ]


def _unsupported_fields(message: ProtoMessage) -> Iterator[tuple[str, str]]:
    present = {field.name for field, _ in message.ListFields()}
    for name, instead in _FIELDS.items():
        if name in present:
            yield name, instead
    if message.model_repository_agents.agents:
        yield "model_repository_agents", "no agents are run"
    yield from _unsupported_parts(message)


def _unsupported_parts(message: ProtoMessage) -> Iterator[tuple[str, str]]:
    for group in message.instance_group:
        if group.passive:
            yield (
                f"instance_group '{group.name}' passive",
                "such instances execute no requests: leave them out",
            )
