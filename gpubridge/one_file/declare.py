"""``@gpubridge.model``: declares a function or a class as a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np

from gpubridge.errors import invalid
from gpubridge.tensor.datatypes import DATATYPES, config_name
from gpubridge.tensor.dtypes import datatype_from_numpy

_Target = TypeVar("_Target", bound=Callable[..., Any])
_DECLARATION = "__gpubridge_model__"
_KINDS = {"cpu": "KIND_CPU", "gpu": "KIND_GPU", "auto": "KIND_AUTO"}
_OPTIONAL = "optional"
_CONCURRENCY = 64
"""Coroutines that run at once, where a function without batching is one."""
_DEFAULTS = ("", (-1,), "")
"""Data-type, shape, and whether it is optional, where they are not given."""


class Spec(NamedTuple):
    """A tensor of a model: its KServe datatype, and its dims without the batch dimension."""

    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class Declaration:
    """A declared model; ``config`` is its configuration in JSON's form."""

    name: str
    target: Callable[..., Any]
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    config: Mapping[str, Any]
    context: str = ""

    @property
    def function(self) -> Callable[..., Any]:
        """The function, or the method of the class, that answers requests."""
        return self.target.__call__ if isinstance(self.target, type) else self.target

    @property
    def is_stream(self) -> bool:
        """Return whether it is a generator, which answers with any number of responses."""
        function = self.function
        return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)

    @property
    def is_batched(self) -> bool:
        """Return whether it gets the rows of several requests at once."""
        return bool(self.config["max_batch_size"])


def model(  # noqa: PLR0913  (the fields of a configuration)
    *,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    name: str = "",
    batching: bool | int | Mapping[str, Any] = False,
    instances: int = 1,
    concurrency: int | None = None,
    device: str = "cpu",
    parameters: Mapping[str, Any] = {},
    config: Mapping[str, Any] = {},
) -> Callable[[_Target], _Target]:
    """Declare a function or class as a model, for ``gpubridge serve app.py``.

    Its inputs are arguments by name: arrays of NumPy, or tensors for ``torch.from_dlpack`` where they are
    on a GPU. It returns the outputs as a dict, a tuple in their order, or the only one. A generator makes
    a decoupled model. An instance of a class is made in each process of the model, and called; it may
    have ``initialize(args)`` and ``finalize()``. All of them may be coroutines.

    Parameters
    ----------
    inputs, outputs : mapping of str to data-type, or to (data-type, shape)
        A data-type of NumPy, ``str``, or a name such as ``"BF16"``; a shape has -1 for any length, and
        is ``[-1]`` if not given. An input is optional if its argument has a default, or with
        ``"optional"`` as third element for a function that takes ``**inputs``.
    name : str, optional
        That of the function or class if not given.
    batching : bool, int or mapping, optional
        The largest number of rows that it gets at once, True for 64; a mapping has ``max_batch_size``
        and the fields of ``dynamic_batching``. Shapes leave the batch dimension out.
    instances : int, optional
        Processes.
    concurrency : int, optional
        How many coroutines of an ``async def`` run at once in a process: 64 if not given, 1 with batching.
    device : {"cpu", "gpu", "auto"}, optional
    parameters : mapping, optional
        Of the configuration.
    config : mapping, optional
        Other fields of the configuration, in JSON's form.

    Returns
    -------
    callable
        A decorator that returns what it decorates.

    Raises
    ------
    BridgeError
        If the declaration contradicts itself, or the arguments.

    Notes
    -----
    An argument ``request``, or ``batch`` with batching, that is no input gets the `InferenceRequest` or the
    `Batch`. Returning a `TritonError` answers a request with that error.

    Examples
    --------
    >>> @gpubridge.model(inputs={"X": np.float32}, outputs={"Y": np.float32})  # doctest: +SKIP
    ... def double(X):
    ...     return 2 * X
    """
    common = _configuration(batching, instances, device, parameters)

    def declare(target: _Target) -> _Target:
        title, made = name or target.__name__, dict(common)
        taken = {each: _spec(title, each, form) for each, form in inputs.items()}
        given = {each: _spec(title, each, form) for each, form in outputs.items()}
        batched = config.get("max_batch_size", made["max_batch_size"])
        taken, context = _matched(title, target, taken, "batch" if batched else "request")
        declaration = Declaration(title, target, taken, given, made, context)
        if inspect.iscoroutinefunction(declaration.function):
            at_once = concurrency or (1 if batched else _CONCURRENCY)
            made["parameters"] = {
                "COROUTINES": {"string_value": str(at_once)},
                **made["parameters"],
            }
        if declaration.is_stream:
            if made["max_batch_size"]:
                raise invalid(f"model '{title}': a generator answers one request, without batching")
            made["model_transaction_policy"] = {"decoupled": True}
        made.update(input=_tensors(taken), output=_tensors(given), **config)
        setattr(target, _DECLARATION, declaration)
        return target

    return declare


def _configuration(
    batching: bool | int | Mapping[str, Any],
    instances: int,
    device: str,
    parameters: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of the configuration that do not depend on the function."""
    if device not in _KINDS:
        raise invalid(
            f"@gpubridge.model expects device to be one of {', '.join(_KINDS)}, got {device!r}"
        )
    scheduling = dict(batching) if isinstance(batching, Mapping) else {}
    size = scheduling.pop("max_batch_size", 64) if batching else 0
    if not isinstance(batching, (bool, Mapping)):
        size = batching
    return {
        "backend": "python",
        "max_batch_size": size,
        "instance_group": [{"count": instances, "kind": _KINDS[device]}],
        "parameters": {key: {"string_value": str(value)} for key, value in parameters.items()},
        **({"dynamic_batching": scheduling} if size else {}),
    }


def declaration_of(target: Any) -> Declaration | None:
    """Return the declaration of a function or class; None without one."""
    found = getattr(target, _DECLARATION, None)
    return found if isinstance(found, Declaration) else None


def _spec(model_name: str, name: str, form: Any) -> Spec:
    """Return what a data-type, or (data-type, shape, "optional"), declares."""
    parts: tuple[Any, ...] = form if isinstance(form, tuple) else (form,)
    parts += _DEFAULTS[len(parts) :]
    try:
        datatype, dims, optional = parts
        known = _datatype(datatype)
        shape = tuple(int(dim) for dim in dims)
    except (TypeError, ValueError):
        known = None
    if known is None or optional not in ("", _OPTIONAL):
        raise invalid(
            f"model '{model_name}', '{name}': expected a data-type or (data-type, shape), got {form!r}"
        )
    return Spec(known, shape, bool(optional))


def _datatype(given: Any) -> str | None:
    """Return the KServe name of a data-type; None, or TypeError, for another object."""
    name = str(given).replace("TYPE_STRING", "BYTES").replace("TYPE_", "")
    if name in DATATYPES:
        return name
    return datatype_from_numpy(np.dtype(object if given in (str, bytes) else given))


def _tensors(specs: Mapping[str, Spec]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "data_type": config_name(spec.datatype),
            "dims": list(spec.dims),
            **({"optional": True} if spec.optional else {}),
        }
        for name, spec in specs.items()
    ]


def _matched(
    name: str, target: Callable[..., Any], inputs: Mapping[str, Spec], context: str
) -> tuple[dict[str, Spec], str]:
    """Return the inputs, optional ones by their arguments' defaults, and ``context`` if it is wanted."""
    signature = inspect.signature(target.__call__ if isinstance(target, type) else target)
    arguments = dict(signature.parameters)
    if isinstance(target, type):
        arguments.pop(next(iter(arguments)))
    takes_all = any(each.kind is each.VAR_KEYWORD for each in arguments.values())
    named = {
        each.name: each.default is not each.empty
        for each in arguments.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    wanted = context if context in named and context not in inputs else ""
    unknown = [each for each in inputs if each not in named and not takes_all]
    missing = [
        each for each, default in named.items() if each not in (*inputs, wanted) and not default
    ]
    if unknown or missing:
        raise invalid(
            f"model '{name}': expected an argument for each input, and '{context}' if wanted, got the "
            f"inputs {_listed(inputs)} for the arguments {_listed(named)}"
        )
    matched = {
        each: spec._replace(optional=spec.optional or named.get(each, False))
        for each, spec in inputs.items()
    }
    return matched, wanted


def _listed(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
