"""The backend onnxruntime: what it makes of graphs, and what it says of those that do not fit."""

import os

import numpy as np
import pytest

from gpubridge.backends.onnxruntime.model import TritonPythonModel
from tests.unit.backend_models import complete, outputs, request, start_model
from tests.unit.model_configs import cases

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

FLOAT, STRING = 1, 8
CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] },
        { name: "BIAS" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 2 ] },
         { name: "DIFF" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def value(name, kind, shape):
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def write_graph(directory, nodes, inputs, outputs, initializers=()):
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, initializers)
    opset = onnx.helper.make_opsetid("", 17)
    (directory / "1").mkdir(parents=True)
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8),
        directory / "1" / "model.onnx",
    )
    return directory


@pytest.fixture
def add(tmp_path):
    """SUM = X + BIAS and DIFF = X - BIAS, where BIAS is (10, 20) if it is not given."""
    bias = onnx.helper.make_tensor("BIAS", FLOAT, [1, 2], [10.0, 20.0])
    return write_graph(
        tmp_path / "m",
        [
            onnx.helper.make_node("Add", ["X", "BIAS"], ["SUM"]),
            onnx.helper.make_node("Sub", ["X", "BIAS"], ["DIFF"]),
        ],
        [value("X", FLOAT, ["n", 2]), value("BIAS", FLOAT, ["b", "c"])],
        [value("SUM", FLOAT, ["n", 2]), value("DIFF", FLOAT, [None, 2])],
        [bias],
    )


@pytest.fixture
def echo(tmp_path):
    """OUT = IN, strings."""
    node = onnx.helper.make_node("Identity", ["IN"], ["OUT"])
    inputs, results = [value("IN", STRING, ["n", 1])], [value("OUT", STRING, ["n", 1])]
    return write_graph(tmp_path / "m", [node], inputs, results)


def rows(*values):
    return np.array(values, np.float32)


def test_only_outputs_that_are_asked_for_are_computed(add, monkeypatch):
    model = start_model(monkeypatch, TritonPythonModel, add, CONFIG)
    x = rows((1, 2), (3, 4))
    both, one = model.execute([request(["SUM", "DIFF"], X=x), request(["DIFF"], X=x)])
    np.testing.assert_array_equal(outputs(both)["SUM"], [[11, 22], [13, 24]])
    np.testing.assert_array_equal(outputs(both)["DIFF"], [[-9, -18], [-7, -16]])
    assert list(outputs(one)) == ["DIFF"]
    np.testing.assert_array_equal(outputs(one)["DIFF"], [[-9, -18], [-7, -16]])


def test_an_input_that_has_a_value_in_the_graph_may_be_left_out(add, monkeypatch):
    model = start_model(monkeypatch, TritonPythonModel, add, CONFIG)
    x = rows((1, 2))
    given, left_out = model.execute(
        [request(["SUM"], X=x, BIAS=rows((100, 200))), request(["SUM"], X=x)]
    )
    np.testing.assert_array_equal(outputs(given)["SUM"], [[101, 202]])
    np.testing.assert_array_equal(outputs(left_out)["SUM"], [[11, 22]])


def runs(model, monkeypatch):
    """Have the batch size of each run noted in a list."""
    session = model._runner._program
    noted, run = [], session.run

    def note(inputs, names):
        noted.append(len(inputs["X"]))
        return run(inputs, names)

    monkeypatch.setattr(session, "run", note)
    return noted


def test_requests_that_fit_together_are_run_as_one_batch(add, monkeypatch):
    model = start_model(monkeypatch, TritonPythonModel, add, CONFIG)
    noted = runs(model, monkeypatch)
    requests = [request(["SUM"], X=rows(*[(i, i)] * (i + 1))) for i in range(3)]
    for i, response in enumerate(model.execute(requests)):
        np.testing.assert_array_equal(outputs(response)["SUM"], [[i + 10, i + 20]] * (i + 1))
    assert noted == [6]


def test_a_request_that_cannot_be_run_fails_alone(add, monkeypatch):
    model = start_model(monkeypatch, TritonPythonModel, add, CONFIG)
    noted = runs(model, monkeypatch)
    x = rows((1, 2))
    good = request(["SUM"], X=x, BIAS=rows((1, 1), (1, 1)))
    bad = request(["SUM"], X=x, BIAS=rows((1, 1), (1, 1)))
    wrong = request(["SUM"], X=rows((1, 2, 3)))
    answered = model.execute([request(["SUM"], X=x), wrong, request(["SUM"], X=x)])
    assert [response.error() is None for response in answered] == [True, False, True]
    assert answered[1].error().code() == 3, "INVALID_ARG: it is the client's shape"
    assert noted == [2, 1]
    # Joined, these two fit by chance of their sizes, and their answers would be another's.
    answered = model.execute([good, bad])
    assert all("first dimension of 1" in response.error().message() for response in answered)


def test_strings_go_in_and_out(echo, monkeypatch):
    config = """backend: "onnxruntime" max_batch_size: 4
        input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
        output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }"""
    model = start_model(monkeypatch, TritonPythonModel, echo, config)
    words = np.array([["grüße".encode()], [b""], [b"a\0b"]], np.object_)
    broken = np.array([[b"\xff"]], np.object_)
    good, refused = model.execute([request(["OUT"], IN=words), request(["OUT"], IN=broken)])
    assert outputs(good)["OUT"].tolist() == words.tolist()
    assert "input 'IN': expected strings in UTF-8" in refused.error().message()
    assert refused.error().code() == 3


UNFIT = r"""
"X" data_type: TYPE_FP32 => "X" data_type: TYPE_INT32
    input 'X': expected TYPE_FP32
"X" data_type: TYPE_FP32 dims: [ 2 ] => "X" data_type: TYPE_FP32 dims: [ 3 ]
    input 'X': expected the shape \[-1, 2\], as the graph has it, got \[-1, 3\]
"X" data_type: TYPE_FP32 dims: [ 2 ] => "X" data_type: TYPE_FP32 dims: [ -1 ]
    input 'X': expected the shape \[-1, 2\], as the graph has it, got \[-1, -1\]
max_batch_size: 8 =>
    expected the shape \[-1, 2\], .* got \[2\] in config
"SUM" => "TOTAL"
    output 'TOTAL': the graph has none of that name; .*'SUM' TYPE_FP32
name: "X" => name: "Y"
    input 'Y': the graph has none of that name
"X" data_type: TYPE_FP32 dims: [ 2 ] => "X" data_type: TYPE_FP32 dims: [ 2 ] optional: true
    input 'X': optional in config.pbtxt, but the graph has no value for it
{ name: "X" data_type: TYPE_FP32 dims: [ 2 ] }, =>
    expected every input of the graph in config.pbtxt, got none for 'X' TYPE_FP32 \[-1, 2\]
max_batch_size: 8 => max_batch_size: 8 model_transaction_policy { decoupled: true }
    the backend 'onnxruntime' answers each request once
max_batch_size: 8 => max_batch_size: 8 parameters { key: "execution_mode" value { string_value: "2" } }
    parameter execution_mode: expected one of 0, 1, got '2'
max_batch_size: 8 => max_batch_size: 8 optimization { graph { level: 7 } }
    optimization.graph.level: expected one of \[-1, 0, 1\], got 7
max_batch_size: 8 => max_batch_size: 8 default_model_filename: "other.onnx"
    expected the file of model 'm' at .*/m/1/other.onnx, got none there
"""


@pytest.mark.parametrize(("change", "message"), cases(UNFIT))
def test_a_configuration_that_does_not_fit_is_refused(add, monkeypatch, change, message):
    old, _, new = change.partition(" =>")
    assert old in CONFIG
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        start_model(monkeypatch, TritonPythonModel, add, CONFIG.replace(old, new, 1))


def test_a_fixed_first_dimension_is_no_batch(tmp_path, monkeypatch):
    node = onnx.helper.make_node("Identity", ["X"], ["Y"])
    directory = write_graph(
        tmp_path / "m", [node], [value("X", FLOAT, [1, 2])], [value("Y", FLOAT, [1, 2])]
    )
    config = """backend: "onnxruntime" input { name: "X" data_type: TYPE_FP32 dims: [ DIMS ] }
        output { name: "Y" data_type: TYPE_FP32 dims: [ DIMS ] }"""
    with pytest.raises(ValueError, match=r"fixed: \[1, 2\]; set max_batch_size: 0"):
        start_model(
            monkeypatch,
            TritonPythonModel,
            directory,
            config.replace("DIMS", "2") + "max_batch_size: 4",
        )
    model = start_model(monkeypatch, TritonPythonModel, directory, config.replace("DIMS", "1, 2"))
    (response,) = model.execute([request(["Y"], X=rows((1, 2)))])
    np.testing.assert_array_equal(outputs(response)["Y"], [[1, 2]])


@pytest.mark.parametrize(
    ("parameters", "threads"),
    [
        ('parameters { key: "intra_op_thread_count" value { string_value: "3" } }', 3),
        ("instance_group { count: 64 }", 1),
        ("", len(os.sched_getaffinity(0))),
    ],
)
def test_instances_share_the_processors(add, monkeypatch, parameters, threads):
    model = start_model(monkeypatch, TritonPythonModel, add, CONFIG + parameters)
    session = model._runner._program._session
    assert session.get_session_options().intra_op_num_threads == threads


def test_a_gpu_instance_runs_on_the_host_without_one_and_says_so(add, monkeypatch, capfd):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    model = start_model(monkeypatch, TritonPythonModel, add, CONFIG, device="GPU")
    assert outputs(model.execute([request(["SUM"], X=rows((1, 2)))])[0])["SUM"].tolist() == [
        [11, 22]
    ]
    assert "runs on the CPU although its instance is KIND_GPU" in capfd.readouterr().err


@pytest.mark.parametrize(("batch", "dims"), [(8, [2]), (0, [-1, 2])])
def test_the_graph_completes_a_configuration(add, monkeypatch, batch, dims):
    config = complete(
        monkeypatch,
        TritonPythonModel,
        add,
        {
            "name": "m",
            "backend": "onnxruntime",
            "max_batch_size": batch,
            "default_model_filename": "model.onnx",
        },
    )
    assert config["input"] == [{"name": "X", "data_type": "TYPE_FP32", "dims": dims}]
    assert [output["name"] for output in config["output"]] == ["SUM", "DIFF"]
    assert [output["dims"] for output in config["output"]] == [dims, dims]


def test_tensors_with_the_dimension_of_the_batch_alone(tmp_path, monkeypatch):
    node = onnx.helper.make_node("Add", ["X", "X"], ["Y"])
    directory = write_graph(
        tmp_path / "m", [node], [value("X", FLOAT, ["n"])], [value("Y", FLOAT, ["n"])]
    )
    bare = {
        "name": "m",
        "backend": "onnxruntime",
        "max_batch_size": 8,
        "default_model_filename": "model.onnx",
    }
    completed = complete(monkeypatch, TritonPythonModel, directory, bare)
    for kind, name in (("input", "X"), ("output", "Y")):
        entry = {"name": name, "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}
        assert completed[kind] == [entry]
    model = start_model(monkeypatch, TritonPythonModel, directory, text_of(completed))
    one, two = model.execute([request(["Y"], X=rows(1)), request(["Y"], X=rows(2, 3))])
    assert outputs(one)["Y"].tolist() == [2]
    assert outputs(two)["Y"].tolist() == [4, 6]


def text_of(config):
    """A completed configuration as a file."""
    tensors = "".join(
        f"""{kind} {{ name: "{each["name"]}" data_type: {each["data_type"]} dims: {each["dims"]}
            reshape {{ shape: {each["reshape"]["shape"]} }} }}\n"""
        for kind in ("input", "output")
        for each in config[kind]
    )
    return f'backend: "onnxruntime"\nmax_batch_size: {config["max_batch_size"]}\n{tensors}'


@pytest.mark.parametrize("configured", [True, False])
def test_a_graph_with_a_sequence_or_bf16_is_refused_by_name(tmp_path, monkeypatch, configured):
    sequence = onnx.helper.make_tensor_sequence_value_info("Y", FLOAT, ["n", 2])
    construct = onnx.helper.make_node("SequenceConstruct", ["X"], ["Y"])
    identity = onnx.helper.make_node("Identity", ["X"], ["Y"])
    graphs = {
        "sequence": (construct, FLOAT, sequence, "output 'Y'.*got seq.*; convert it to tensors"),
        "bf16": (identity, 16, value("Y", 16, ["n", 2]), "input 'X'.*got tensor.bfloat16.*Cast"),
    }
    for name, (node, kind, result, message) in graphs.items():
        directory = write_graph(tmp_path / name, [node], [value("X", kind, ["n", 2])], [result])
        data_type = "TYPE_BF16" if name == "bf16" else "TYPE_FP32"
        config = f"""backend: "onnxruntime" max_batch_size: 8
            input {{ name: "X" data_type: {data_type} dims: [ 2 ] }}
            output {{ name: "Y" data_type: {data_type} dims: [ 2 ] }}"""
        bare = {
            "name": name,
            "backend": "onnxruntime",
            "max_batch_size": 8,
            "default_model_filename": "model.onnx",
        }
        call, given = (start_model, config) if configured else (complete, bare)
        with pytest.raises(ValueError, match=message):
            call(monkeypatch, TritonPythonModel, directory, given)


def test_a_misspelt_parameter_is_refused_and_another_unknown_one_said(add, monkeypatch, capfd):
    entry = 'parameters {{ key: "{}" value {{ string_value: "1" }} }}'
    start_model(monkeypatch, TritonPythonModel, add, CONFIG + entry.format("session.own"))
    said = "parameter session.own: the backend 'onnxruntime' has none of that name, so it has no"
    assert said in capfd.readouterr().err
    with pytest.raises(ValueError, match="did you mean enable_mem_arena"):
        start_model(monkeypatch, TritonPythonModel, add, CONFIG + entry.format("enable_mem_area"))


def test_accelerators_have_no_effect_and_the_log_says_so(add, monkeypatch, capfd):
    accelerated = """optimization { graph { level: 1 }
        execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }"""
    start_model(monkeypatch, TritonPythonModel, add, CONFIG + accelerated)
    said = capfd.readouterr().err
    assert "optimization.execution_accelerators has no effect on the backend 'onnxruntime'" in said
    assert "optimization.graph" not in said


def test_a_graph_that_has_every_value_needs_no_input(tmp_path, monkeypatch):
    x = onnx.helper.make_tensor("X", FLOAT, [1, 2], [1.0, 2.0])
    node = onnx.helper.make_node("Identity", ["X"], ["Y"])
    directory = write_graph(
        tmp_path / "m", [node], [value("X", FLOAT, ["n", 2])], [value("Y", FLOAT, ["n", 2])], [x]
    )
    config = """backend: "onnxruntime" max_batch_size: 4
        input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] optional: true }
        output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }"""
    model = start_model(monkeypatch, TritonPythonModel, directory, config)
    answered = model.execute([request(["Y"]), request(["Y"], X=rows((3, 4))), request(["Y"])])
    assert [outputs(one)["Y"].tolist() for one in answered] == [[[1, 2]], [[3, 4]], [[1, 2]]]
