"""Choice of a model's backend by its configuration and its files, as in Triton."""

import pytest

from gpubridge.config import Backends, load_model_config
from gpubridge.engine.environments.provider import environment_parameters
from gpubridge.errors import BridgeError

TENSORS = 'input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }'
SHIPPED = Backends()


def load(repository, config, filename="", backends=SHIPPED):
    version = repository / "m" / "1"
    version.mkdir(parents=True)
    if filename:
        (version / filename).touch()
    (version.parent / "config.pbtxt").write_text(config + TENSORS)
    return load_model_config(version.parent, gpu_count=0, backends=backends)


def own_backend(folder, name):
    (folder / name).mkdir(parents=True)
    path = folder / name / "model.py"
    path.touch()
    return path


# Observed on Triton 2.51: backend, platform, default_model_filename, runtime.
ONNX = ("onnxruntime", "onnxruntime_onnx", "model.onnx", "model.py")
TORCH = ("pytorch", "pytorch_libtorch", "model.pt", "model.py")
PYTHON = ("python", "", "model.py", "")


@pytest.mark.parametrize(
    ("config", "filename", "settled"),
    [
        ('backend: "onnxruntime"', "", ONNX),
        ('platform: "onnxruntime_onnx"', "", ONNX),
        ("", "model.onnx", ONNX),
        ('default_model_filename: "model.onnx"', "model.onnx", ONNX),
        ('backend: "pytorch"', "", TORCH),
        ('platform: "pytorch_libtorch"', "", TORCH),
        ("", "model.pt", TORCH),
        ('backend: "python"', "", PYTHON),
        ("", "model.py", PYTHON),
        ('backend: "image_preproc"', "", ("image_preproc", "", "", "model.py")),
        ('backend: "image_preproc" runtime: "model.py"', "", ("image_preproc", "", "", "model.py")),
        (
            'backend: "image_preproc" platform: "p" default_model_filename: "f"',
            "",
            ("image_preproc", "p", "f", "model.py"),
        ),
    ],
)
def test_defaults_that_are_filled_in(tmp_path, config, filename, settled):
    loaded = load(tmp_path, config, filename)
    message = loaded.message
    assert (
        loaded.backend,
        message.platform,
        message.default_model_filename,
        message.runtime,
    ) == settled
    assert loaded.backend_file == SHIPPED.find(loaded.backend)
    assert loaded.notices == ()


def test_shipped_backends_are_there_by_name():
    assert SHIPPED.names() == ["image_preproc", "onnxruntime", "pytorch"]
    assert all(SHIPPED.find(name).is_file() for name in SHIPPED.names())
    assert SHIPPED.find("python") is None


def test_a_backend_of_the_users_directory_wins(tmp_path):
    path = own_backend(tmp_path / "backends", "onnxruntime")
    other = own_backend(tmp_path / "backends", "other")
    # Triton's own backends are no Python programs: they lie there, too, and are passed over.
    (tmp_path / "backends" / "pytorch").mkdir()
    backends = Backends(tmp_path / "backends")
    assert load(tmp_path, 'backend: "onnxruntime"', backends=backends).backend_file == path
    assert load(tmp_path / "2", 'backend: "other"', backends=backends).backend_file == other
    assert backends.find("pytorch") == SHIPPED.find("pytorch")
    assert backends.names() == ["image_preproc", "onnxruntime", "other", "pytorch"]


@pytest.mark.parametrize("name", ["..", "../backends/other", "a/../other", ""])
def test_a_name_that_leads_elsewhere_is_no_backend(tmp_path, name):
    own_backend(tmp_path / "backends", "other")
    (tmp_path / "model.py").touch()
    assert Backends(tmp_path / "backends").find(name) is None


def test_another_runtime_is_refused(tmp_path):
    with pytest.raises(BridgeError, match=r"unable to find backend library 'other\.py' for model"):
        load(tmp_path, 'backend: "onnxruntime" runtime: "other.py"')


@pytest.mark.parametrize("name", ["pb_exec_env_model.py.tar.gz", "venv"])
def test_a_backend_may_bring_an_environment(tmp_path, name):
    path = own_backend(tmp_path / "backends", "other")
    backends = Backends(tmp_path / "backends")
    bare = load(tmp_path / "1", 'backend: "other"', backends=backends)
    assert "EXECUTION_ENV_PATH" not in environment_parameters(bare)
    (path.parent / name).mkdir()
    environment = environment_parameters(load(tmp_path / "2", 'backend: "other"', "", backends))
    assert environment["EXECUTION_ENV_PATH"] == str(path.parent / name)
    own = 'backend: "other" parameters { key: "EXECUTION_ENV_PATH" value { string_value: "own" } }'
    parameters = environment_parameters(load(tmp_path / "3", own, "", backends))
    assert parameters["EXECUTION_ENV_PATH"] == "own"
    python = load(tmp_path / "4", 'backend: "python"', "", backends)
    assert "EXECUTION_ENV_PATH" not in environment_parameters(python)
