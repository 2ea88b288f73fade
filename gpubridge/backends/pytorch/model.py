"""Runs a model's ``model.pt``, with the parameters of Triton's backend of this name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from gpubridge.backends.batching import BatchRunner, object_array, texts_of
from gpubridge.backends.model_setup import ModelSetup, import_library
from gpubridge.backends.pytorch.program import (
    Forward,
    argument_names,
    check_output_names,
    load_forward,
    pick_output,
)
from gpubridge.tensor.datatypes import DATATYPES

_WITHOUT_EFFECT = (
    "ENABLE_CACHE_CLEANING",
    "ENABLE_JIT_EXECUTOR",
    "ENABLE_JIT_PROFILING",
    "ENABLE_NVFUSER",
    "ENABLE_TENSOR_FUSER",
    "ENABLE_WEIGHT_SHARING",
)
"""Triton's parameters that change only a model's speed or memory."""


class TritonPythonModel:
    """One module, which runs whole batches."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the module, and compare its forward with the configuration."""
        torch = import_library("torch", "torch", "pytorch")
        setup = ModelSetup.from_args(args)
        _configure(torch, setup)
        device = _device(torch, setup)
        forward = load_forward(torch, setup.model_file(pb_utils.get_model_dir()), device)
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: forward({', '.join(forward.arguments)}) on {device}, "
            f"{torch.get_num_threads()} threads"
        )
        self._runner = BatchRunner(setup, _Module(torch, setup, forward, device))
        for notice in setup.parameters.refuse_misspelt("pytorch"):
            pb_utils.Logger.log_warn(notice)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request."""
        return self._runner.execute(requests)


class _Module:
    """A `gpubridge.backends.batching.Program` of tensors, and of NumPy arrays for strings."""

    def __init__(self, torch: Any, setup: ModelSetup, forward: Forward, device: Any) -> None:
        self._torch = torch
        self._forward = forward
        self._device = device
        self._arguments = argument_names(setup, forward)
        check_output_names(setup, forward)
        self._strings_shape = (-1, 1) if setup.max_batch_size > 0 else (-1,)
        parameters = setup.parameters
        self._inference_mode = parameters.flag("INFERENCE_MODE", default=True)
        self._optimized = not parameters.flag("DISABLE_OPTIMIZED_EXECUTION", default=False)

    def take(self, tensor: pb_utils.Tensor) -> Any:
        if tensor.triton_dtype() == DATATYPES["BF16"].number:
            return self._torch.from_dlpack(tensor).to(self._device)
        array = tensor.as_numpy()
        if array.dtype == np.object_:
            return array
        if not array.flags.writeable:
            # The array is shared, and forward may write to its arguments.
            array = array.copy()
        return self._torch.from_numpy(array).to(self._device)

    def join(self, arrays: Sequence[Any]) -> Any:
        if isinstance(arrays[0], np.ndarray):
            return np.concatenate(arrays)
        return self._torch.cat(list(arrays))

    def run(self, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        given = {
            self._arguments[name]: texts_of(name, value, "as PyTorch has them")
            if isinstance(value, np.ndarray)
            else value
            for name, value in inputs.items()
        }
        forward = self._forward
        with ExitStack() as modes:
            mode = self._torch.inference_mode if self._inference_mode else self._torch.no_grad
            modes.enter_context(mode())
            if not self._optimized:
                modes.enter_context(self._torch.jit.optimized_execution(False))
            if forward.takes_dict:
                result = forward.module(given)
            else:
                positional = self._leading(given)
                result = forward.module(*positional, **given)
            return {name: self._array(name, pick_output(result, name)) for name in outputs}

    def _leading(self, given: dict[str, Any]) -> list[Any]:
        """Remove the positional arguments from `given`, and return them."""
        forward = self._forward
        leading = []
        for name in forward.arguments:
            if name not in given or name in forward.keywords:
                break
            leading.append(given.pop(name))
        return leading

    def _array(self, name: str, value: Any) -> Any:
        if isinstance(value, self._torch.Tensor):
            # A view may be marked as negated, which DLPack does not say.
            return value.detach().cpu().resolve_neg().contiguous()
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return object_array([text.encode() for text in value], self._strings_shape)
        raise ValueError(
            f"output '{name}': expected forward to return a tensor or a list of str there, got "
            f"{type(value).__name__}"
        )

    def keep(self, array: Any) -> Any:
        # It may be a buffer of the module, or a view of one.
        return array if isinstance(array, np.ndarray) else array.clone()

    def give(self, name: str, array: Any) -> pb_utils.Tensor:
        if isinstance(array, np.ndarray):
            return pb_utils.Tensor(name, array)
        # Tensor.numpy() would keep a buffer of the module from being resized for ever.
        return pb_utils.Tensor.from_dlpack(name, array)


def _configure(torch: Any, setup: ModelSetup) -> None:
    parameters = setup.parameters
    torch.set_num_threads(
        parameters.whole_number("INTRA_OP_THREAD_COUNT", 0, least=0) or setup.threads
    )
    between = parameters.whole_number("INTER_OP_THREAD_COUNT", 0, least=0)
    if between:
        torch.set_num_interop_threads(between)
    torch.backends.cudnn.enabled = parameters.flag("ENABLE_CUDNN", default=True)
    for notice in setup.unused_optimizations():
        pb_utils.Logger.log_warn(notice)
    for key in _WITHOUT_EFFECT:
        if key in parameters:
            pb_utils.Logger.log_warn(f"model '{setup.name}': parameter {key} has no effect here")


def _device(torch: Any, setup: ModelSetup) -> Any:
    if setup.gpu is None:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", setup.gpu)
    pb_utils.Logger.log_warn(
        f"model '{setup.name}' runs on the CPU although its instance is KIND_GPU: this PyTorch "
        "finds no CUDA; install one that does, or set kind: KIND_CPU"
    )
    return torch.device("cpu")
