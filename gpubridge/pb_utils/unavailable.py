"""Public names whose working parts are not built yet: they exist, and say so when used."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.named_enum import NamedEnum

__all__ = [
    "Metric",
    "MetricFamily",
    "MetricKind",
    "SharedMemory",
    "is_model_ready",
    "load_model",
    "refuse",
    "unload_model",
]


def refuse(what: str) -> NoReturn:
    """Raise TritonModelException for something this version cannot do."""
    raise TritonModelException(
        f"{what} is not supported by this version of gpubridge yet; see the compatibility table "
        "in its documentation"
    )


class MetricKind(NamedEnum):
    """The kinds of metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


MetricKind.__module__ = "c_python_backend_utils"


class Metric:
    """One time series of a `MetricFamily`, which makes it."""

    __module__ = "c_python_backend_utils"

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        refuse("Metric")


class MetricFamily:
    """Metrics of one name: custom metrics are not there yet."""

    __module__ = "c_python_backend_utils"

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        refuse("MetricFamily")

    def Metric(
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> Metric:
        """Raise: custom metrics are not there yet."""
        refuse("MetricFamily.Metric()")


class SharedMemory:
    """Triton's shared memory pool, which gpubridge does not have: there is nothing to measure."""

    __module__ = "c_python_backend_utils"

    def free_memory(self) -> int:
        """Raise: there is no such pool."""
        refuse("shared_memory.free_memory()")


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Raise: model control from a model is not there yet."""
    refuse("load_model()")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Raise: model control from a model is not there yet."""
    refuse("unload_model()")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Raise: model control from a model is not there yet."""
    refuse("is_model_ready()")
