"""Runs a model's ``model.onnx``, with the parameters of Triton's backend of this name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from gpubridge.backends.batching import BatchRunner, UnusableInput, object_array, texts_of
from gpubridge.backends.model_setup import ModelSetup, import_library
from gpubridge.backends.onnxruntime.graph import Graph

_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED"}
"""Optimization levels by ``optimization { graph { level } }``."""


class TritonPythonModel:
    """One session, which runs whole batches."""

    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Add the inputs and outputs of the graph that the configuration lacks."""
        setup = ModelSetup.from_config(config.as_dict())
        if setup.inputs and setup.outputs:
            return config
        graph = Graph(_open(setup))
        for entry in () if setup.inputs else graph.entries(setup, "input"):
            entry.add_to(config, "input")
        for entry in () if setup.outputs else graph.entries(setup, "output"):
            entry.add_to(config, "output")
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the graph, and compare it with the configuration."""
        setup = ModelSetup.from_args(args)
        session = _open(setup)
        Graph(session).check(setup)
        notices = setup.unused_optimizations(used=["graph"])
        for notice in (*notices, *setup.parameters.refuse_misspelt("onnxruntime")):
            pb_utils.Logger.log_warn(notice)
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: {', '.join(session.get_providers())}, "
            f"{session.get_session_options().intra_op_num_threads} threads"
        )
        self._runner = BatchRunner(setup, _Session(session))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request."""
        return self._runner.execute(requests)


class _Session:
    """A `gpubridge.backends.batching.Program` of NumPy arrays."""

    def __init__(self, session: Any) -> None:
        self._session = session
        state = import_library(
            "onnxruntime.capi.onnxruntime_pybind11_state", "onnxruntime", "onnxruntime"
        )
        self._unusable = state.InvalidArgument

    def take(self, tensor: pb_utils.Tensor) -> npt.NDArray[Any]:
        array = tensor.as_numpy()
        if array.dtype != np.object_:
            return array
        texts = texts_of(tensor.name(), array, "which is what ONNX has")
        return object_array(texts, array.shape)

    def join(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate(arrays)

    def run(self, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        try:
            return dict(zip(outputs, self._session.run(outputs, inputs)))
        except self._unusable as error:
            raise UnusableInput(str(error)) from error

    def keep(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        # Made anew by each run.
        return array

    def give(self, name: str, array: npt.NDArray[Any]) -> pb_utils.Tensor:
        if array.dtype == np.object_:
            texts = [text.encode() for text in array.reshape(-1).tolist()]
            array = object_array(texts, array.shape)
        return pb_utils.Tensor(name, array)


def _open(setup: ModelSetup) -> Any:
    """Create the session of a model."""
    onnxruntime = import_library("onnxruntime", "onnxruntime", "onnxruntime")
    path = setup.model_file(pb_utils.get_model_dir())
    options = _options(setup, onnxruntime)
    return onnxruntime.InferenceSession(
        str(path), options, providers=_providers(setup, onnxruntime)
    )


def _options(setup: ModelSetup, onnxruntime: Any) -> Any:
    parameters = setup.parameters
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = (
        parameters.whole_number("intra_op_thread_count", 0, least=0) or setup.threads
    )
    options.inter_op_num_threads = parameters.whole_number("inter_op_thread_count", 0, least=0)
    if parameters.choice("execution_mode", "0", ("0", "1")) == "1":
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = parameters.choice("enable_mem_arena", "1", ("0", "1")) == "1"
    options.enable_mem_pattern = parameters.choice("enable_mem_pattern", "1", ("0", "1")) == "1"
    optimization = setup.config.get("optimization", {})
    level = int(optimization.get("graph", {}).get("level", 0))
    if level not in _LEVELS:
        raise ValueError(
            f"optimization.graph.level: expected one of {sorted(_LEVELS)}, got {level}"
        )
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[level])
    return options


def _providers(setup: ModelSetup, onnxruntime: Any) -> list[Any]:
    if setup.gpu is None:
        return [_CPU]
    if _CUDA in onnxruntime.get_available_providers():
        return [(_CUDA, {"device_id": setup.gpu}), _CPU]
    pb_utils.Logger.log_warn(
        f"model '{setup.name}' runs on the CPU although its instance is KIND_GPU: this onnxruntime "
        "has no CUDA; install onnxruntime-gpu instead, or set kind: KIND_CPU"
    )
    return [_CPU]
