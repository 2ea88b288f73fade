"""Models that do not load, or die, as data: a name, the files they consist of, what is special about them."""

from dataclasses import dataclass

from tests.unit.model_configs import cases

TENSORS = """
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
CONFIG = (
    'backend: "python"\nmax_batch_size: 0\n' + TENSORS + "instance_group [ { kind: KIND_CPU } ]\n"
)
BARE = 'backend: "python"\n'
HEAD = "import triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n"
EXECUTE = """
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())])
            for r in requests
        ]
"""
GOOD = HEAD + EXECUTE


@dataclass(frozen=True)
class Broken:
    """One model directory; ``files`` maps paths inside it to their text (None: an empty directory)."""

    name: str
    files: dict[str, str | None]
    gets_request: bool = False  # it loads at the peer: ask it once


def code(name: str, source: str, **fields: bool) -> Broken:
    """A model with a good config and this model.py."""
    return Broken(name, {"config.pbtxt": CONFIG, "1/model.py": source}, **fields)


def config(name: str, text: str, **fields: bool) -> Broken:
    """A model with a good model.py and this config."""
    return Broken(name, {"config.pbtxt": text, "1/model.py": GOOD}, **fields)


def initialize(name: str, statement: str) -> Broken:
    """A model whose initialize runs this statement."""
    return code(name, f"{HEAD}    def initialize(self, args):\n        {statement}\n{EXECUTE}")


def auto_complete(name: str, statement: str, text: str) -> Broken:
    """A model whose auto_complete_config runs this statement."""
    method = f"    @staticmethod\n    def auto_complete_config(config):\n        {statement}\n"
    return Broken(name, {"config.pbtxt": text, "1/model.py": HEAD + method + EXECUTE})


def execute(name: str, statement: str) -> Broken:
    """A model whose execute runs this statement."""
    source = f"{HEAD}    def execute(self, requests):\n        {statement}\n"
    return code(name, source, gets_request=True)


CODE = [
    code("good", GOOD, gets_request=True),
    code("syntax_error", GOOD + "\n    def broken(:\n"),
    code("import_error", "import no_such_module_of_ours\n" + GOOD),
    code("raises_at_import", GOOD + '\nraise RuntimeError("planted at import")\n'),
    code("exits_at_import", "import sys\n" + GOOD + "\nsys.exit(3)\n"),
    code("dies_at_import", "import os\n" + GOOD + "\nos._exit(3)\n"),
    code("empty_file", ""),
    code("no_class", "class Model:\n    pass\n"),
    code("class_is_a_number", "TritonPythonModel = 5\n"),
    code("no_execute", HEAD + "    pass\n"),
    code(
        "constructor_raises", f'{HEAD}    def __init__(self):\n        raise KeyError("planted")\n'
    ),
    code("prints", "print('planted print')\n" + GOOD),
    Broken("no_model_file", {"config.pbtxt": CONFIG, "1": None}),
    Broken("no_version", {"config.pbtxt": CONFIG}),
    Broken("version_is_a_word", {"config.pbtxt": CONFIG, "latest/model.py": GOOD}),
    Broken("version_zero", {"config.pbtxt": CONFIG, "0/model.py": GOOD}),
    Broken("version_padded", {"config.pbtxt": CONFIG, "01/model.py": GOOD}),
    Broken("no_config", {"1/model.py": GOOD}),
    Broken("empty_directory", {".": None}),
    Broken(
        "one_version_of_two_broken",
        {
            "config.pbtxt": CONFIG + "version_policy { all { } }\n",
            "1/model.py": GOOD,
            "2/model.py": 'raise ValueError("planted")\n',
        },
    ),
]

INITIALIZE = [
    initialize("initialize_raises", 'raise ValueError("planted in initialize")'),
    initialize(
        "initialize_raises_model_exception", 'raise pb_utils.TritonModelException("planted")'
    ),
    initialize("initialize_exits", "raise SystemExit(3)"),
    initialize("initialize_dies", "import os; os._exit(3)"),
    initialize("initialize_is_killed", "import os; os.kill(os.getpid(), 9)"),
    initialize("initialize_segfaults", "import os; os.kill(os.getpid(), 11)"),
    initialize("initialize_returns_a_value", "return 5"),
]

COMPLETED = {
    "": CONFIG,
    "BARE": BARE,
    "PARTLY": BARE + 'input [ { name: "IN" } ]\noutput [ { name: "OUT" dims: [ 1 ] } ]\n',
    "NO_DIMS": CONFIG.replace("dims: [ 1 ]", "", 1),
    "BATCHES": CONFIG.replace("size: 0", "size: 4"),
    "SEQUENCES": CONFIG.replace("size: 0", "size: 4") + "sequence_batching { }\n",
    "DECOUPLED": CONFIG + "model_transaction_policy { decoupled: true }\n",
}
# A name, one of those configurations behind it, and what auto_complete_config does.
_COMPLETIONS = """\
auto_complete_raises
    raise ValueError("planted in auto-complete")
auto_complete_returns_none
    return None
auto_complete_returns_a_dict
    return config.as_dict()
auto_complete_dies
    import os; os._exit(3)
auto_complete_input_without_dims
    config.add_input({"name": "IN"}); return config
auto_complete_other_dtype
    config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}); return config
auto_complete_other_dims
    config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [7]}); return config
auto_complete_bad_dtype > BARE
    config.add_input({"name": "X", "data_type": "TYPE_NONE", "dims": [1]}); return config
auto_complete_nothing > BARE
    return config
auto_complete_exits
    raise SystemExit(3)
auto_complete_unknown_field > BARE
    config.as_dict()["no_such"] = 1; return config
auto_complete_what_is_missing > PARTLY
    config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1]});
    config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}); return config
auto_complete_leaves_an_input_without_dims > NO_DIMS
    return config
auto_complete_dim_zero > BARE
    config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [0]}); return config
auto_complete_smaller_batch > BATCHES
    config.set_max_batch_size(2); return config
auto_complete_other_scheduler > SEQUENCES
    config.set_dynamic_batching(); return config
auto_complete_other_policy > DECOUPLED
    config.set_model_transaction_policy({"decoupled": False}); return config
auto_complete_policy_of_something_else
    config.set_model_transaction_policy({"coupled": True}); return config
auto_complete_other_optional
    config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1], "optional": True});
    return config
auto_complete_input_with_more
    config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1], "reshape": {}});
    return config
auto_complete_optional_output
    config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [1], "optional": True});
    return config
auto_complete_output_without_name
    config.add_output({"data_type": "TYPE_INT32", "dims": [1]}); return config
auto_complete_ensemble
    config.as_dict()["ensemble_scheduling"] = {"step": []}; return config
auto_complete_negative_batch
    config.as_dict()["max_batch_size"] = -1; return config
"""
AUTO_COMPLETE = [
    auto_complete(name.partition(" > ")[0], statement, COMPLETED[name.partition(" > ")[2]])
    for name, statement in cases(_COMPLETIONS)
]

CONFIGS = [
    config("config_not_text_format", "this is not a config {\n"),
    config("config_unknown_field", CONFIG + "unknown_field: 1\n"),
    config("config_of_another_name", 'name: "other"\n' + CONFIG),
    config("config_empty", ""),
    config("config_without_backend", TENSORS),
    config("config_unknown_backend", CONFIG.replace('"python"', '"no_such_backend"')),
    config("config_no_tensors", 'backend: "python"\n'),
    config("config_unknown_dtype", CONFIG.replace("TYPE_INT32", "TYPE_INT33", 1)),
    config("config_invalid_dtype", CONFIG.replace("TYPE_INT32", "TYPE_INVALID", 1)),
    config("config_no_dtype", CONFIG.replace("data_type: TYPE_INT32", "", 1)),
    config("config_no_dims", CONFIG.replace("dims: [ 1 ]", "", 1)),
    config("config_dim_zero", CONFIG.replace("[ 1 ]", "[ 0 ]", 1)),
    config("config_dim_minus_two", CONFIG.replace("[ 1 ]", "[ -2 ]", 1)),
    config("config_negative_batch", CONFIG.replace("size: 0", "size: -1")),
    config(
        "config_input_twice",
        CONFIG + 'input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]\n',
    ),
    config("config_input_without_name", CONFIG.replace('name: "IN" ', "")),
    config(
        "config_bad_reshape",
        CONFIG.replace("dims: [ 1 ]", "dims: [ 4 ] reshape { shape: [ 3 ] }", 1),
    ),
    config("config_batching_without_batch", CONFIG + "dynamic_batching { }\n"),
    config(
        "config_two_schedulers",
        CONFIG.replace("size: 0", "size: 4") + "dynamic_batching { }\nsequence_batching { }\n",
    ),
    config("config_absent_version", CONFIG + "version_policy { specific { versions: [ 7 ] } }\n"),
    config("config_no_instances", CONFIG.replace("kind: KIND_CPU", "count: -1 kind: KIND_CPU")),
    config("config_cpu_with_gpus", CONFIG.replace("KIND_CPU", "KIND_CPU gpus: [ 0 ]")),
    config("config_gpu_without_gpu", CONFIG.replace("KIND_CPU", "KIND_GPU")),
    config("config_gpu_99", CONFIG.replace("KIND_CPU", "KIND_GPU gpus: [ 99 ]")),
    config("config_other_file", CONFIG + 'default_model_filename: "other.py"\n'),
    config(
        "config_bad_placement",
        CONFIG
        + 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "perhaps" } }\n',
    ),
    config(
        "config_absent_environment",
        CONFIG
        + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/no/such/environment.tar.gz" } }\n',
    ),
    config("bad;name", CONFIG),
]

DEATHS = [
    execute("execute_dies", "import os; os._exit(3)"),
    execute("execute_segfaults", "import os; os.kill(os.getpid(), 11)"),
    execute("execute_exits", "raise SystemExit(3)"),
    code(
        "finalize_raises",
        GOOD + '\n    def finalize(self):\n        raise ValueError("planted in finalize")\n',
    ),
    code("finalize_dies", GOOD + "\n    def finalize(self):\n        import os; os._exit(3)\n"),
]

BROKEN: tuple[Broken, ...] = (*CODE, *INITIALIZE, *AUTO_COMPLETE, *CONFIGS, *DEATHS)
