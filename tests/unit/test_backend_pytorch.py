"""The backend pytorch: TorchScript modules and exported programs, by Triton's names."""

import importlib
import warnings

import numpy as np
import pytest

from gpubridge.backends.pytorch.model import TritonPythonModel
from gpubridge.backends.pytorch.program import Forward
from tests.unit.backend_models import outputs, request, start_model

CONFIG = """
backend: "pytorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2 ] },
        { name: "INPUT__1" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] },
         { name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
IN_AND_OUT = """
backend: "pytorch"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
NAMED = CONFIG.replace("INPUT__0", "right").replace("INPUT__1", "left")


@pytest.fixture(scope="module")
def made():
    """What is made with PyTorch, whose import takes seconds."""
    pytest.importorskip("torch")
    return importlib.import_module("tests.unit.torch_modules")


@pytest.fixture
def start(made, tmp_path, monkeypatch):
    """Start models by their configuration."""
    threads = made.torch.get_num_threads()

    def start(config=CONFIG, device="CPU"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return start_model(monkeypatch, TritonPythonModel, tmp_path / "m", config, device)

    yield start
    made.torch.set_num_threads(threads)


def rows(*values):
    return np.array(values, np.float32)


@pytest.fixture(params=["script", "export"])
def add(made, request, tmp_path):
    """A model of either kind, of two arguments and two results."""
    if request.param == "script":
        return made.script(tmp_path / "m", made.SumAndDifference())
    return made.export(
        tmp_path / "m", made.SumAndDifference(), (made.torch.ones(2, 2), made.torch.ones(2, 2))
    )


def test_tensors_by_index(add, start):
    model = start()
    requests = [
        request(["OUTPUT__0", "OUTPUT__1"], INPUT__0=rows((i, 1)), INPUT__1=rows((1, i)))
        for i in range(3)
    ]
    requests.append(
        request(["OUTPUT__1"], INPUT__1=rows((1, 1), (2, 2)), INPUT__0=rows((5, 5), (5, 5)))
    )
    *singles, last = model.execute(requests)
    for i, response in enumerate(singles):
        answered = outputs(response)
        np.testing.assert_array_equal(answered["OUTPUT__0"], [[i + 1, i + 1]])
        np.testing.assert_array_equal(answered["OUTPUT__1"], [[i - 1, 1 - i]])
    assert outputs(last)["OUTPUT__1"].tolist() == [[4, 4], [3, 3]]
    assert list(outputs(last)) == ["OUTPUT__1"]


def test_tensors_by_the_names_of_arguments(add, start):
    (response,) = start(NAMED).execute(
        [request(["OUTPUT__1"], right=rows((1, 1)), left=rows((9, 9)))]
    )
    assert outputs(response)["OUTPUT__1"].tolist() == [[8, 8]]


def test_keyword_arguments_and_a_dict_of_results_of_an_exported_program(made, tmp_path, start):
    made.export(
        tmp_path / "m", made.ByKeyword(), (made.torch.ones(2, 2),), {"right": made.torch.ones(2, 2)}
    )
    config = NAMED.replace("OUTPUT__0", "sum").replace("OUTPUT__1", "diff")
    model = start(config)
    (response,) = model.execute(
        [request(["diff", "sum"], right=rows((1, 1), (1, 1)), left=rows((9, 9), (8, 8)))]
    )
    assert outputs(response)["diff"].tolist() == [[8, 8], [7, 7]]
    assert outputs(response)["sum"].tolist() == [[10, 10], [9, 9]]


def test_a_dict_goes_in_and_out(made, tmp_path, start):
    made.script(tmp_path / "m", made.FromDict())
    config = CONFIG.replace("INPUT__0", "a").replace("INPUT__1", "b").replace("OUTPUT__0", "sum")
    config = config.replace("OUTPUT__1", "none")
    given = {"a": rows((1, 2)), "b": rows((3, 4))}
    good, bad = start(config).execute([request(["sum"], **given), request(["none"], **given)])
    assert outputs(good)["sum"].tolist() == [[4, 6]]
    assert "output 'none': expected a key of what forward returns: sum" in bad.error().message()


def test_strings_are_lists_of_str(made, tmp_path, start):
    made.script(tmp_path / "m", made.Shout())
    config = """backend: "pytorch" max_batch_size: 4
        input { name: "words" data_type: TYPE_STRING dims: [ 1 ] }
        output { name: "OUTPUT__0" data_type: TYPE_STRING dims: [ 1 ] }"""
    model = start(config)
    words = np.array([["hä".encode()], [b""]], np.object_)
    broken = np.array([[b"\xff"]], np.object_)
    one, two, refused = model.execute(
        [
            request(["OUTPUT__0"], words=words),
            request(["OUTPUT__0"], words=words[:1]),
            request(["OUTPUT__0"], words=broken),
        ]
    )
    assert outputs(one)["OUTPUT__0"].tolist() == [["Hä".encode()], [b""]]
    assert outputs(two)["OUTPUT__0"].tolist() == [["Hä".encode()]]
    assert "input 'words': expected strings in UTF-8" in refused.error().message()
    assert refused.error().code() == 3


def test_shared_inputs_are_not_written_to(made, tmp_path, start):
    made.script(tmp_path / "m", made.InPlace())
    x = np.zeros(3, np.float32)
    x.flags.writeable = False
    (response,) = start(IN_AND_OUT).execute([request(["y"], x=x)])
    assert outputs(response)["y"].tolist() == [1, 1, 1]
    assert x.tolist() == [0, 0, 0]


@pytest.mark.parametrize("values", [[3], [1, 2]])
def test_a_negated_view_is_sent_with_its_values(made, tmp_path, start, values):
    made.script(tmp_path / "m", made.Imaginary())
    (response,) = start(IN_AND_OUT).execute([request(["y"], x=rows(*values))])
    assert outputs(response)["y"].tolist() == [-value for value in values]


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [
        ("BOOL", np.bool_),
        ("UINT8", np.uint8),
        ("INT64", np.int64),
        ("FP16", np.float16),
        ("FP64", np.float64),
        ("BF16", "bfloat16"),
    ],
)
def test_types_cross_as_they_are(made, tmp_path, start, data_type, dtype):
    made.script(tmp_path / "m", made.torch.nn.Identity())
    config = f"""backend: "pytorch" input {{ name: "INPUT__0" data_type: TYPE_{data_type} dims: [ 2 ] }}
        output {{ name: "OUTPUT__0" data_type: TYPE_{data_type} dims: [ 2 ] }}"""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    x = np.array([0, 1], dtype)
    (response,) = start(config).execute([request(["OUTPUT__0"], INPUT__0=x)])
    answered = outputs(response)["OUTPUT__0"]
    assert answered.dtype == x.dtype
    assert answered.tolist() == x.tolist()


def test_nothing_is_copied_on_the_way(made, tmp_path, start):
    made.script(tmp_path / "m", made.torch.nn.Identity())
    config = """backend: "pytorch" input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] }"""
    x = np.zeros(2, np.float32)
    (response,) = start(config).execute([request(["OUTPUT__0"], INPUT__0=x)])
    assert np.shares_memory(outputs(response)["OUTPUT__0"], x)


def test_another_type_than_configured_is_an_error(add, start):
    model = start(CONFIG.replace("TYPE_FP32", "TYPE_FP64", 3).replace("TYPE_FP64", "TYPE_FP32", 2))
    given = {"INPUT__0": rows((1, 1)), "INPUT__1": rows((1, 1))}
    (response,) = model.execute([request(["OUTPUT__0"], **given)])
    assert "output 'OUTPUT__0': expected TYPE_FP64, as config.pbtxt says, got TYPE_FP32" in (
        response.error().message()
    )


def test_a_failing_request_fails_alone(add, start):
    good = {"INPUT__0": rows((1, 1)), "INPUT__1": rows((1, 1))}
    bad = {"INPUT__0": rows((1, 1, 1)), "INPUT__1": rows((1, 1, 1, 1))}
    names = ["OUTPUT__0"]
    answered = start().execute([request(names, **good), request(names, **bad)])
    assert [response.error() is None for response in answered] == [True, False]


def test_runs_of_a_batch_do_not_overwrite_the_answers_of_others(made, tmp_path, start):
    made.script(tmp_path / "m", made.Recycling())
    config = """backend: "pytorch" max_batch_size: 8
        input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] },
                 { name: "OUTPUT__1" data_type: TYPE_BOOL dims: [ 1 ] } ]"""
    model = start(config)
    names = ["OUTPUT__0", "OUTPUT__1"]
    # Of the last two, each is one run; the second needs a larger buffer.
    for given in ([[1], [5], [9], [-1]], [[1], [5, 6], [9], [2, 3, 4]], [[7]], [[1, 2, 3, 4, 5]]):
        responses = model.execute([request(names, INPUT__0=rows(row)) for row in given])
        for row, response in zip(given, responses, strict=True):
            if row == [-1]:
                assert "negative" in response.error().message()
                continue
            answered = outputs(response)
            np.testing.assert_array_equal(answered["OUTPUT__0"], [[2 * each for each in row]])
            assert answered["OUTPUT__1"].tolist() == [[sum(row) > 4]]


@pytest.mark.parametrize("mode", ["true", "false"])
def test_inference_mode_and_optimization_are_chosen(made, tmp_path, start, mode, monkeypatch):
    made.script(tmp_path / "m", made.torch.nn.Identity())
    config = f"""backend: "pytorch" input {{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ 1 ] }}
        output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1 ] }}
        parameters {{ key: "INFERENCE_MODE" value {{ string_value: "{mode}" }} }}
        parameters {{ key: "DISABLE_OPTIMIZED_EXECUTION" value {{ string_value: "{mode}" }} }}"""
    model = start(config)
    modes = []

    def look(x):
        modes.append(
            (made.torch.is_inference_mode_enabled(), made.torch._C._get_graph_executor_optimize())
        )
        assert not made.torch.is_grad_enabled()
        return x

    monkeypatch.setattr(model._runner._program, "_forward", Forward(look, ("input",)))
    model.execute([request(["OUTPUT__0"], INPUT__0=np.zeros(1, np.float32))])
    assert modes == [(mode == "true", mode == "false")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("INPUT__1", "INPUT__2", r"input 'INPUT__2': expected the name of an argument of forward"),
        ("INPUT__1", "other", r"\(left, right\) or one that ends in __ and its index"),
        ("INPUT__1", "left", "input 'left': expected one input per argument, got another for"),
        ("OUTPUT__1", "diff", "output 'diff': expected a name that ends in __ and the index"),
        ('INPUT__1" data_type: TYPE_FP32', 'INPUT__1" data_type: TYPE_STRING', "expected a tensor"),
        (
            "max_batch_size: 8",
            'max_batch_size: 8 parameters { key: "INFERENCE_MODE" value { string_value: "1" } }',
            "parameter INFERENCE_MODE: expected one of true, false, got '1'",
        ),
        (
            "max_batch_size: 8",
            'max_batch_size: 8 default_model_filename: "other.pt"',
            "expected the file of model 'm' at .*/m/1/other.pt, got none there",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(made, tmp_path, start, old, new, message):
    made.script(tmp_path / "m", made.SumAndDifference())
    assert old in CONFIG
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        start(CONFIG.replace(old, new, 1))


def test_an_index_beyond_the_results_is_an_error(made, tmp_path, start):
    made.script(tmp_path / "m", made.SumAndDifference())
    model = start(CONFIG.replace("OUTPUT__1", "OUTPUT__2"))
    given = {"INPUT__0": rows((1, 1)), "INPUT__1": rows((1, 1))}
    (response,) = model.execute([request(["OUTPUT__2"], **given)])
    assert "output 'OUTPUT__2': expected an index below 2" in response.error().message()


@pytest.mark.parametrize("kind", ["weights", "text"])
def test_a_file_that_is_no_program_is_refused_unread(made, tmp_path, start, kind):
    path = tmp_path / "m" / "1" / "model.pt"
    path.parent.mkdir(parents=True)
    if kind == "weights":
        made.torch.save(made.torch.nn.Linear(1, 1).state_dict(), path)
    else:
        path.write_text("nothing")
    what = "torch.save makes of weights" if kind == "weights" else "no archive of PyTorch"
    with pytest.raises(
        ValueError, match=rf"TorchScript module .* got a file that is .*{what}|is {what}"
    ):
        start()


def test_a_misspelt_parameter_is_refused(made, tmp_path, start):
    made.script(tmp_path / "m", made.SumAndDifference())
    extra = 'parameters { key: "INTRA_OP_THREADS_COUNT" value { string_value: "1" } }'
    with pytest.raises(ValueError, match="did you mean INTRA_OP_THREAD_COUNT"):
        start(CONFIG + extra)


def test_parameters_without_effect_and_an_absent_gpu_are_said(made, tmp_path, start, capfd):
    made.script(tmp_path / "m", made.SumAndDifference())
    extra = """parameters { key: "ENABLE_JIT_EXECUTOR" value { string_value: "false" } }
        parameters { key: "tokenizer" value { string_value: "own" } }
        optimization { graph { level: 1 } }"""
    start(CONFIG + extra, "CPU" if made.torch.cuda.is_available() else "GPU")
    said = capfd.readouterr().err
    assert "parameter ENABLE_JIT_EXECUTOR has no effect here" in said
    assert "parameter tokenizer: the backend 'pytorch' has none of that name, so it has no" in said
    assert "model 'm': optimization.graph has no effect on the backend 'pytorch'" in said
    if not made.torch.cuda.is_available():
        assert "runs on the CPU although its instance is KIND_GPU" in said
