"""Texts of errors that a model raised, and the errors that name no place."""

import importlib
import json
import os
import re

import numpy as np
import pytest

from gpubridge import pb_utils
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.stub.error_text import model_error_text
from gpubridge.stub.loader import answer_readiness, load_model

HERE = re.escape(__file__)


class Unprintable(Exception):
    """Its text raises, as often as it is asked for."""

    def __init__(self, another=None):
        super().__init__()
        self.another = another

    def __str__(self):
        raise self.another or self


def inner(error):
    raise error


def told(error):
    """The text of an error that was raised two functions deep."""
    with pytest.raises(BaseException) as caught:
        inner(error)
    return model_error_text(caught.value)


@pytest.mark.parametrize(
    ("another", "second"),
    [
        (ValueError("no text"), "ValueError: no text"),
        (KeyError(), "KeyError: <EMPTY MESSAGE>"),
        (SystemExit(1), "SystemExit: 1"),
        (None, "Unprintable: <MESSAGE UNAVAILABLE>"),
        (Unprintable(), "Unprintable: <MESSAGE UNAVAILABLE>"),
    ],
)
def test_an_error_that_cannot_tell_its_text_is_told_with_why(another, second):
    first, _, rest = told(Unprintable(another)).partition(
        "\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: "
    )
    assert first.startswith("Unprintable: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\nAt:\n")
    assert rest.startswith(second + "\n\nAt:\n")
    assert "): __str__\n" in rest


def write(folder, source):
    path = folder / "model.py"
    path.write_text(source)
    return str(path)


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """Undo what loading a model does to the process."""
    monkeypatch.setattr("sys.path", list(importlib.sys.path))
    monkeypatch.setattr("sys.modules", dict(importlib.sys.modules))


@pytest.fixture
def loading(tmp_path, monkeypatch):
    """Loads a source as a stub does; what that does to the process is undone."""

    def load(source):
        with pytest.raises(BaseException) as caught:
            load_model(write(tmp_path, source), "1")
        # Without the place of this call.
        error = caught.value.with_traceback(caught.tb.tb_next)
        return model_error_text(error).replace(str(tmp_path), "")

    return load


def test_a_file_of_the_same_size_and_second_is_what_it_is_now(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    for number in (1, 2):
        path = write(tmp_path, f"class TritonPythonModel: number = {number}")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert load_model(path, "1").number == number


def test_a_file_that_is_not_there_is_told_apart_from_one_that_a_model_misses(tmp_path):
    with pytest.raises(
        BridgeError, match=r"^Failed to preinitialize Python stub: Python model file not found in '"
    ) as caught:
        load_model(os.fspath(tmp_path / "model.py"), "1")
    assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("there", ["1/Model.py", "1/main.py", "model.py", ""])
def test_a_file_that_lies_elsewhere_is_named(tmp_path, there):
    (tmp_path / "1").mkdir()
    (tmp_path / "config.py").touch()
    if there:
        (tmp_path / there).touch()
    with pytest.raises(BridgeError) as caught:
        load_model(os.fspath(tmp_path / "1" / "model.py"), "1")
    told = f"; there is '{tmp_path / there}': move or rename it" if there else ""
    assert caught.value.message.endswith(f"not found in '{tmp_path / '1' / 'model.py'}'{told}")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            "pb_utils.get_input_tensor_by_name(request, 'X').as_numpy()",
            "the request has the inputs 'A', 'B'",
        ),
        ("pb_utils.get_output_tensor_by_name(answer, 'X').shape()", "a name that is not there"),
        ("None.other", ""),
    ],
)
def test_a_tensor_that_is_none_is_explained(asked, told):
    tensors = [pb_utils.Tensor(name, np.zeros(1, np.float32)) for name in "AB"]
    names = {"pb_utils": pb_utils, "answer": pb_utils.InferenceResponse(tensors)}
    if "request" in asked:
        names["request"] = pb_utils.InferenceRequest(
            model_name="m", requested_output_names=["O"], inputs=tensors
        )
    with pytest.raises(AttributeError) as caught:
        exec(compile(asked, "model.py", "exec"), names)
    hint = model_error_text(caught.value).partition("\n\nAt:\n")[2].partition("\n\n")[2]
    assert hint.endswith(told)
    assert bool(hint) == bool(told)


def test_the_places_of_an_error_in_a_shipped_backend_are_told():
    pytest.importorskip("PIL")
    from gpubridge.backends.image_preproc import image_files

    with pytest.raises(image_files.ImageError) as caught:
        image_files.require_format(b"no", ["JPEG"])
    pattern = rf"  {re.escape(image_files.__file__)}\(\d+\): require_format\n"
    assert re.search(pattern, model_error_text(caught.value))


def test_a_versions_init_file_runs_first_and_gives_what_it_has(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("from . import sibling\nVALUE = 3\nPATH = __file__\n")
    (tmp_path / "sibling.py").write_text("NAME = __name__\n")
    source = "from . import PATH, VALUE, sibling\nclass TritonPythonModel:\n"
    model = load_model(
        write(tmp_path, source + "    told = VALUE, PATH, sibling.NAME, __name__"), "1"
    )
    assert model.told == (3, str(tmp_path / "__init__.py"), "1.sibling", "1.model")


def test_a_model_imports_from_the_working_directory_first(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    for folder in (here, tmp_path):
        (folder / "helper_in_both.py").write_text(f"FOLDER = {str(folder)!r}\n")
    monkeypatch.chdir(here)
    source = "import helper_in_both\nclass TritonPythonModel: found = helper_in_both.FOLDER\n"
    assert load_model(write(tmp_path, source), "1").found == str(here)
    assert importlib.sys.path[0] == ""
    assert importlib.sys.path[-2:] == [str(tmp_path), str(tmp_path.parent)]


@pytest.mark.parametrize(
    "line",
    [
        "import triton_python_backend",
        "from triton_python_backend.tensor import Tensor",
        "from triton_python_backend_utils.tensor import Tensor",
    ],
)
def test_modules_that_tutorials_invent_are_told_the_real_one(loading, line):
    said = loading(line)
    assert said.startswith("ModuleNotFoundError: No module named 'triton_python_backend")
    assert "models write: import triton_python_backend_utils as pb_utils" in said


def test_a_model_may_have_a_module_of_such_a_name(tmp_path, monkeypatch):
    (tmp_path / "triton_python_helpers.py").write_text("VALUE = 3\n")
    source = "import triton_python_helpers as t\nclass TritonPythonModel: value = t.VALUE\n"
    assert load_model(write(tmp_path, source), "1").value == 3


def test_an_init_file_that_raises_is_told(tmp_path, loading):
    (tmp_path / "__init__.py").write_text("raise RuntimeError('planted')")
    assert loading("x = 1") == ("RuntimeError: planted\n\nAt:\n  /__init__.py(1): <module>\n")


def test_readiness_is_asked_of_the_method_that_the_model_has_now():
    class Model:
        def is_ready(self):
            self.is_ready = lambda: "no bool"
            return True

    with answer_readiness(Model(), None) as asked:
        told = []
        for _ in range(2):
            asked.send(b"?")
            told.append(json.loads(asked.recv(1 << 16)))
    assert told == [
        {"ready": True},
        {"ready": False, "error": "is_ready() must return a boolean value"},
    ]
