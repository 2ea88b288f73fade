"""Models whose libraries speak DLPack with streams, or make their results in the instance's arena.

The libraries are stand-ins: one asks for memory as CuPy does (PyTorch: tests/unit/test_framework_arena.py), and
their kernels are host functions on a stream.
"""

import numpy as np
import pytest

from tests.process.device_models import (
    ARENA,
    DOUBLE,
    LIBRARY,
    running_device_server,
    write_device_model,
)
from tests.process.test_device_edges import ensemble

COUNT = 20_000
NBYTES = 4 * COUNT
PLACED = 'parameters { key: "INPUT_PLACEMENT" value { string_value: "device" } }'

SPEAKING = """
import contextlib, sys, types
from gpubridge.tensor import dlpack, dlpack_abi

_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))


class Tensor:
    # A tensor of a library that knows DLPack, in memory that `owner` keeps.
    def __init__(self, pointer, shape, stream, owner=None):
        self.pointer, self.shape, self.stream, self.owner = pointer, tuple(shape), stream, owner

    def __dlpack_device__(self):
        return 2, current_device()

    def __dlpack__(self, stream=None, max_version=None):
        event = ok(d.cuEventCreate(2))
        ok(d.cuEventRecord(event, self.stream))
        ok(d.cuStreamWaitEvent(1 if stream is None else stream, event, 0))
        return dlpack.make_capsule(self, self.pointer, "FP32", self.shape,
                                   self.__dlpack_device__(), max_version,
                                   read_only=False, copied=False)


def pointer_in(capsule):
    managed = dlpack_abi.DLManagedTensor.from_address(_pointer(capsule, b"dltensor"))
    assert managed.dl_tensor.device.device_type == 2
    assert managed.dl_tensor.byte_offset == 0
    return managed.dl_tensor.data


class Cupy:
    def __init__(self, stream):
        self.function = None
        self.cuda = types.SimpleNamespace(
            using_allocator=self.using, Device=lambda: types.SimpleNamespace(id=current_device()),
            get_current_stream=lambda device=-1: types.SimpleNamespace(ptr=stream),
            UnownedMemory=lambda *fields: fields, MemoryPointer=lambda memory, offset: memory)

    @contextlib.contextmanager
    def using(self, function):
        self.function = function
        yield
        self.function = None

    def empty(self, nbytes):
        pointer, _, owner, _ = self.function(nbytes)
        return pointer, owner
"""

# A model takes its input, makes memory for its output, and gives that away.
TAKEN = {"stream": "given.__dlpack__(stream=library.stream)", "complete": "given.to_dlpack()"}
MADE = {
    "own": 'pointer = library.array("out", shape).__cuda_array_interface__["data"][0]\n'
    "        owner = None",
    "arena": "with pb_utils.device_arena(reserve=2 << 20):\n"
    "            pointer, owner = self.framework.empty(4 * int(np.prod(shape)))",
}
GIVEN = {"object": "result", "capsule": "result.__dlpack__()"}
#: Model -> what it does of each, and the library that it has.
MODELS = {
    "object": ("stream", "own", "object", ""),
    "capsule": ("complete", "own", "capsule", ""),
    "cupy": ("stream", "arena", "object", "Cupy"),
}


def source_of(model):
    taken, made, given, library = MODELS[model]
    setup = f'sys.modules["{model}"] = {library}(self.library.stream)' if library else "None"
    return f"""
{LIBRARY}
{SPEAKING}

class TritonPythonModel:
    def initialize(self, args):
        self.library = Library(args)
        self.framework = {setup}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        library = self.library
        given = request.inputs()[0]
        assert not given.is_cpu()
        capsule, shape = {TAKEN[taken]}, given.shape()
        {MADE[made]}
        library.double(pointer_in(capsule), pointer, int(np.prod(shape)))
        result = Tensor(pointer, shape, library.stream, owner)
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", {GIVEN[given]})])
"""


@pytest.fixture(scope="module")
def served(repository):
    for name in MODELS:
        write_device_model(repository, name, source_of(name), config=PLACED)
        ensemble(repository, f"{name}_then_double", [name, "double"])
    write_device_model(repository, "double", DOUBLE)
    with running_device_server(repository) as served:
        yield served


def values():
    return np.random.default_rng().random(COUNT, np.float32)


@pytest.mark.parametrize("model", ["object", "cupy"])
def test_to_the_network(served, model):
    for _ in range(5):
        given = values()
        with served.doing(model, h2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=1):
            assert served.infer(model, given) == (200, (2 * given).tolist())


def test_without_streams(served):
    for _ in range(5):
        given = values()
        before = served.work("capsule")["waits"]
        assert served.infer("capsule", given) == (200, (2 * given).tolist())
        # The second is for the input, unless that has arrived by then.
        assert served.work("capsule")["waits"] - before in (1, 2)


@pytest.mark.parametrize("model", ["object", "cupy"])
def test_to_another_model(served, model):
    copies = {} if MODELS[model][1] == "arena" else {"d2d": (NBYTES, 1)}
    for _ in range(5):
        given = values()
        with (
            served.doing(model, h2d=(NBYTES, 1), **copies),
            served.doing("double", d2h=(NBYTES, 1), waits=1),
        ):
            assert served.infer(f"{model}_then_double", given) == (200, (4 * given).tolist())


def test_arena_memory_returns_to_the_arena(served):
    # Many times what there is of it.
    given = np.random.default_rng().random(ARENA // 64, np.float32)
    for _ in range(20):
        assert served.infer("cupy", given) == (200, (2 * given).tolist())


def test_more_than_the_arena_has(served):
    status, error = served.infer("cupy", np.ones(2_400_000))
    assert status == 500
    assert "device memory arena is full" in error
    given = values()
    assert served.infer("cupy", given) == (200, (2 * given).tolist())
