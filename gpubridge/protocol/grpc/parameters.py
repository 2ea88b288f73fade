"""Parameters of a gRPC request, its inputs and its outputs, with Triton's error texts."""

from __future__ import annotations

from typing import Any

from gpubridge.errors import invalid
from gpubridge.protocol.fields import json_parameters, text_of_sequence
from gpubridge.protocol.request_form import REGION, REGION_OFFSET, REGION_SIZE, SharedRegion
from gpubridge.request import NO_CONTEXT, NO_OPTIONS, RequestOptions
from gpubridge.schema import ProtoMessage
from gpubridge.transport.context import RequestContext, correlated

_EMPTY_FINAL = "triton_enable_empty_final_response"
_UNSIGNED = (1 << 64) - 1


def read_parameters(
    given: ProtoMessage, long: memoryview | None = None
) -> tuple[RequestContext, RequestOptions, bool]:
    """Parse the parameters of a request; raises BridgeError.

    ``long``: the custom parameters as JSON, if they were removed from the message.

    Returns the context for the stub, the options for the scheduler (without shapes), and whether the
    client of a stream requests an empty final response.
    """
    if not given and long is None:
        return NO_CONTEXT, NO_OPTIONS, False
    correlation: int | str = 0
    flags = timeout = 0
    custom: dict[str, Any] = {}
    priority = 0
    empty_final = False
    for name in sorted(given):
        value = given[name]
        if name == "sequence_id":
            correlation = _sequence_id(value)
        elif name in ("sequence_start", "sequence_end"):
            flags |= _boolean(name, value) << (name == "sequence_end")
        elif name == "priority":
            priority = _priority(value)
        elif name == "timeout":
            # Triton reinterprets a negative one as unsigned.
            timeout = _choice(name, value, ("int64_param",)) & _UNSIGNED
        elif name == _EMPTY_FINAL:
            empty_final = _boolean(name, value)
        else:
            custom[name] = _custom(name, value)
    options = RequestOptions(priority, timeout, correlation, bool(flags & 1), bool(flags & 2))
    context = RequestContext(
        **correlated(correlation),
        flags=flags,
        timeout=timeout,
        parameters=json_parameters(custom) if custom else long or "",
    )
    return context, options, empty_final


def shared_region(tensor: ProtoMessage) -> SharedRegion | None:
    """Return the region named by the parameters of an input or output, if any.

    Raises BridgeError: INVALID_ARG with Triton's text.
    """
    found: dict[str, Any] = {}
    for name, field in (
        (REGION, "string_param"),
        (REGION_SIZE, "int64_param"),
        (REGION_OFFSET, "int64_param"),
    ):
        if name in tensor.parameters:
            value = tensor.parameters[name]
            if value.WhichOneof("parameter_choice") != field:
                raise invalid(
                    f"invalid value type for '{name}' parameter for tensor '{tensor.name}', "
                    f"expected {field}."
                )
            found[name] = getattr(value, field)
    if REGION not in found:
        for name in found:
            raise invalid(
                f"'{name}' can not be specified without '{REGION}' parameter for tensor "
                f"'{tensor.name}'"
            )
        return None
    if REGION_SIZE not in found:
        raise invalid(
            f"'{REGION_SIZE}' must be specified along with '{REGION}' parameter for tensor "
            f"'{tensor.name}'"
        )
    return SharedRegion(found[REGION], found[REGION_SIZE], found.get(REGION_OFFSET, 0))


def classes_wanted(tensor: ProtoMessage) -> int:
    """Return the number of classes requested of an output; 0 for its values.

    Raises BridgeError: INVALID_ARG with Triton's text.
    """
    if "classification" not in tensor.parameters:
        return 0
    count: int = _choice(
        "classification", tensor.parameters["classification"], ("int64_param",), ""
    )
    if count <= 0:
        raise invalid("invalid value for 'classification' parameter, expected >= 0")
    return count


def _choice(name: str, value: ProtoMessage, fields: tuple[str, ...], stop: str = ".") -> Any:
    """Return the value of a parameter, which must be set in one of the given fields."""
    field = value.WhichOneof("parameter_choice")
    if field not in fields:
        raise invalid(
            f"invalid value type for '{name}' parameter, expected {' or '.join(fields)}{stop}"
        )
    return getattr(value, field)


def _boolean(name: str, value: ProtoMessage) -> bool:
    flag: bool = _choice(name, value, ("bool_param",))
    return flag


def _sequence_id(value: ProtoMessage) -> int | str:
    given: int | str = _choice("sequence_id", value, ("int64_param", "string_param"))
    return text_of_sequence(given) if isinstance(given, str) else given & _UNSIGNED


def _priority(value: ProtoMessage) -> int:
    priority: int = _choice("priority", value, ("int64_param", "uint64_param"))
    if priority < 0:
        raise invalid("invalid value for 'priority', expected value >= 0.")
    return priority


def _custom(name: str, value: ProtoMessage) -> bool | int | str | float:
    if name.startswith("triton_"):
        raise invalid(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
            f"following keys starting with 'triton_' are allowed: {_EMPTY_FINAL}"
        )
    field = value.WhichOneof("parameter_choice")
    if field not in ("bool_param", "int64_param", "string_param", "double_param"):
        raise invalid(
            f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or "
            "string_param."
        )
    given: bool | int | str | float = getattr(value, field)
    return given
