"""Models of the shipped backends without a server: as a stub starts them, and asks them."""

import json
from pathlib import Path

import triton_python_backend_utils as pb_utils

from gpubridge.config import load_model_config


def start_model(monkeypatch, kind: type, directory: Path, config: str, device: str = "CPU"):
    """Initialize a model of a backend; ``directory`` has the model's name, and its version 1."""
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(config)
    loaded = load_model_config(directory, gpu_count=0)
    monkeypatch.setattr(pb_utils, "get_model_dir", lambda: str(directory / "1"))
    model = kind()
    model.initialize(
        {
            "model_config": loaded.to_json(),
            "model_instance_kind": device,
            "model_instance_name": f"{loaded.name}_0",
            "model_instance_device_id": "0",
            "model_repository": str(directory),
            "model_version": "1",
            "model_name": loaded.name,
        }
    )
    return model


def complete(monkeypatch, kind: type, directory: Path, config: dict):
    """Have a backend complete a configuration; returns it."""
    monkeypatch.setattr(pb_utils, "get_model_dir", lambda: str(directory / "1"))
    return kind.auto_complete_config(pb_utils.ModelConfig(json.dumps(config))).as_dict()


def request(outputs, **inputs):
    """Make a request of arrays, by the inputs' names."""
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    return pb_utils.InferenceRequest(
        inputs=tensors, requested_output_names=list(outputs), model_name="m"
    )


def outputs(response):
    """The arrays of a response, by the outputs' names."""
    assert response.error() is None, response.error().message()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
