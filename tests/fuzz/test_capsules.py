"""DLPack capsules of any content: both engines read the same of them, or refuse them alike."""

import ctypes

import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError
from gpubridge.tensor import dlpack, dlpack_abi, native
from gpubridge.tensor.device_bytes import DeviceBytes
from tests.fuzz.budget import fuzzed
from tests.unit.device_doubles import Stream, name_of

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NAMES = {False: b"dltensor", True: b"dltensor_versioned"}


def mostly(usual, odd):
    """A strategy that gives what is usual in eleven of twelve cases: there are many fields."""
    return st.integers(0, 11).flatmap(lambda number: odd if number == 11 else usual)


DIMS = st.lists(
    mostly(st.integers(0, 5), st.sampled_from([-1, 1 << 20, 1 << 40, (1 << 63) - 1])), max_size=5
)
WORDS = st.integers(0, (1 << 64) - 1)
STRUCTURES = st.fixed_dictionaries(
    {
        "versioned": st.booleans(),
        "major": mostly(st.just(1), st.sampled_from([0, 2])),
        "flags": mostly(st.integers(0, 7), WORDS),
        "data": mostly(st.just(0x7F00_0000_0000), st.one_of(WORDS, st.sampled_from([0, 1]))),
        "device_type": mostly(st.sampled_from([1, 2, 3, 13]), st.integers(-1, 20)),
        "device_id": mostly(st.just(0), st.integers(-1, 2)),
        "code": mostly(st.sampled_from([0, 1, 2]), st.integers(0, 255)),
        "bits": mostly(st.sampled_from([16, 32, 64]), st.sampled_from([8, 4, 0, 255])),
        "lanes": mostly(st.just(1), st.integers(0, 3)),
        "shape": mostly(DIMS, st.none()),
        "strides": st.one_of(st.none(), st.just("C"), st.just("C"), DIMS),
        "byte_offset": mostly(st.integers(0, 4096), WORDS),
        "deleter": st.booleans(),
    }
)


class Foreign:
    """A producer's structure in a capsule; counts how often it is told to let go."""

    def __init__(self, content):
        versioned = content["versioned"]
        layout = dlpack_abi.DLManagedTensorVersioned if versioned else dlpack_abi.DLManagedTensor
        self.managed = layout()
        self.deleted = 0
        self._deleter = _DELETER(self._delete)
        if content["deleter"]:
            self.managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        if versioned:
            self.managed.version.major = content["major"]
            self.managed.flags = content["flags"]
        tensor = self.managed.dl_tensor
        tensor.data = content["data"]
        tensor.device.device_type = content["device_type"]
        tensor.device.device_id = content["device_id"]
        for field in ("code", "bits", "lanes"):
            setattr(tensor.dtype, field, content[field])
        tensor.byte_offset = content["byte_offset"]
        shape, strides = content["shape"], content["strides"]
        tensor.ndim = 2 if shape is None else len(shape)
        self._shape = None if shape is None else (ctypes.c_int64 * len(shape))(*shape)
        tensor.shape = self._shape
        self._strides = None
        if strides is not None and shape is not None:
            self._strides = (ctypes.c_int64 * len(shape))(*self._dims(shape, strides))
        tensor.strides = self._strides
        self.name = _NAMES[versioned]
        self.capsule = _new(ctypes.addressof(self.managed), self.name, None)

    @staticmethod
    def _dims(shape, strides):
        if strides == "C":
            stride, found = 1, []
            for dim in reversed(shape):
                found.append(stride)
                stride = min(max(stride * dim, 0), (1 << 63) - 1)
            return reversed(found)
        return (strides + [1] * len(shape))[: len(shape)]

    def _delete(self, _address):
        self.deleted += 1


def outcome(content):
    """Return the tensor's fields of a capsule, or the refusal."""
    foreign, stream = Foreign(content), Stream()
    try:
        tensor = dlpack.import_capsule(foreign.capsule, stream)
    except BridgeError as error:
        assert name_of(foreign.capsule) == foreign.name
        assert foreign.deleted == 0
        assert stream.asked == []
        return error.code, error.message
    assert name_of(foreign.capsule) == b"used_" + foreign.name
    memory = tensor.memory
    if isinstance(memory, DeviceBytes):
        place = memory.pointer, memory.nbytes, memory.ordinal, memory.read_only
    else:
        place = memory.nbytes, memory.readonly
    shape, datatype = tensor.shape, tensor.datatype
    del tensor, memory
    assert foreign.deleted == (1 if content["deleter"] else 0)
    return datatype, shape, place, stream.asked


@fuzzed(3)
@given(STRUCTURES)
def test_both_engines_do_the_same(content):
    if native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    compiled = outcome(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dlpack, "native", lambda: None)
        assert outcome(content) == compiled
