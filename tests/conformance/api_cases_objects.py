"""Parts 1.0 to 1.5 of the API's tables: names, functions, errors, tensors."""

from __future__ import annotations

from tests.conformance.api_case import ApiCase


def _cases(part: str, row: str, codes: dict[str, str]) -> list[ApiCase]:
    return [ApiCase(part, row, name, code) for name, code in codes.items()]


NAMES = [
    *_cases(
        "1.0",
        "names",
        {
            "pb_utils": (
                "missing('TritonError TritonModelException Tensor InferenceRequest InferenceResponse Logger "
                "PreferredMemory TRITONSERVER_MEMORY_GPU TRITONSERVER_MEMORY_CPU MetricFamily load_model "
                "unload_model is_model_ready get_model_dir', pb_utils)"
            ),
            "embedded module": (
                "missing('InferenceTrace Metric MetricKind MemoryType InferenceResponseSender "
                "ResponseIterator SharedMemory shared_memory', c_python_backend_utils)"
            ),
            "log levels": "missing('LogLevel INFO WARNING ERROR VERBOSE', pb_utils.Logger)",
            "no TritonInferenceException": "hasattr(pb_utils, 'TritonInferenceException')",
            "module of the classes": (
                "sorted({getattr(pb_utils, name).__module__ for name in 'Tensor InferenceRequest "
                "InferenceResponse TritonError TritonModelException PreferredMemory'.split()})"
            ),
            "free_memory": "hasattr(c_python_backend_utils.shared_memory, 'free_memory')",
            "get_model_dir": "pb_utils.get_model_dir().split('/')[-2:]",
        },
    ),
]
FUNCTIONS = [
    *_cases(
        "1.1",
        "TRITON_STRING_TO_NUMPY",
        {
            "all": (
                "sorted((name, np.dtype(kind).name) for name, kind in "
                "pb_utils.TRITON_STRING_TO_NUMPY.items())"
            ),
            "lookup": "pb_utils.triton_string_to_numpy('TYPE_FP16').__name__",
            "unknown": "raises(lambda: pb_utils.triton_string_to_numpy('TYPE_BF16'))",
        },
    ),
    *_cases(
        "1.1",
        "flags",
        {
            "sequences": (
                "pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, "
                "pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END"
            ),
            "final": "int(FINAL)",
            "release": (
                "pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL, "
                "pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"
            ),
        },
    ),
    *_cases(
        "1.1",
        "serialize_byte_tensor",
        {
            "objects": "pb_utils.serialize_byte_tensor(np.array([b'a', 'bc', 3], object)).hex()"
            " if hasattr(pb_utils.serialize_byte_tensor(np.array([b'a', 'bc', 3], object)), 'hex')"
            " else type(pb_utils.serialize_byte_tensor(np.array([b'a', 'bc', 3], object))).__name__",
            "empty": "pb_utils.serialize_byte_tensor(np.array([], object))",
            "numbers": "pb_utils.serialize_byte_tensor(np.zeros(3))",
        },
    ),
    *_cases(
        "1.1",
        "deserialize_bytes_tensor",
        {"two": "pb_utils.deserialize_bytes_tensor(b'\\1\\0\\0\\0a\\2\\0\\0\\0bc')"},
    ),
    *_cases(
        "1.1",
        "get_…_by_name",
        {
            "input": "show(pb_utils.get_input_tensor_by_name(request(), 'B'))",
            "no input": "pb_utils.get_input_tensor_by_name(request(), 'X')",
            "output": (
                "show(pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([tensor('O')]), 'O'))"
            ),
            "no output": "pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([]), 'O')",
            "configuration": (
                "[pb_utils.get_input_config_by_name(json.loads(self.args['model_config']), name) is None "
                "for name in ('CODE', 'X')] + "
                "[pb_utils.get_output_config_by_name(json.loads(self.args['model_config']), 'SAID')['dims']]"
            ),
        },
    ),
    *_cases(
        "1.1",
        "transaction policy",
        {
            "this": (
                "pb_utils.using_decoupled_model_transaction_policy(json.loads(self.args['model_config']))"
            )
        },
    ),
    *_cases(
        "1.1",
        "numbered types",
        {
            "to numpy": (
                "[np.dtype(pb_utils.triton_to_numpy_type(number)).name for number in range(1, 14)]"
            ),
            "from numpy": (
                "[pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(number)) "
                "for number in range(1, 14)]"
            ),
            "bytes": "pb_utils.numpy_to_triton_type(np.bytes_)",
            "unknown": "pb_utils.numpy_to_triton_type(np.dtype('c8'))",
        },
    ),
]
ERRORS = [
    *_cases(
        "1.3",
        "TritonError",
        {
            "default": "pb_utils.TritonError('text').code() == pb_utils.TritonError.INTERNAL",
            "message": "pb_utils.TritonError('text').message()",
            "keyword": "pb_utils.TritonError(message='text').message()",
            "codes": (
                "missing('UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS "
                "CANCELLED', pb_utils.TritonError)"
            ),
            "code shows": "str(pb_utils.TritonError('text', pb_utils.TritonError.NOT_FOUND).code())",
            "None": "raises(lambda: pb_utils.TritonError(None))",
            "None as code": "raises(lambda: pb_utils.TritonError('text', None))",
        },
    ),
    *(
        ApiCase(
            "1.3",
            "code at the client",
            name,
            f"answer = pb_utils.InferenceResponse(error=pb_utils.TritonError('text', pb_utils.TritonError.{name}))",
        )
        for name in [
            "UNKNOWN",
            "INTERNAL",
            "NOT_FOUND",
            "INVALID_ARG",
            "UNAVAILABLE",
            "UNSUPPORTED",
            "ALREADY_EXISTS",
            "CANCELLED",
        ]
    ),
    *_cases(
        "1.3",
        "TritonModelException",
        {
            "base": "[base.__name__ for base in pb_utils.TritonModelException.__mro__]",
            "made by a model": "raises(lambda: (_ for _ in ()).throw(pb_utils.TritonModelException('x')))",
        },
    ),
]
TENSORS = [
    *_cases(
        "1.4",
        "Tensor",
        {
            "keywords": "raises(lambda: pb_utils.Tensor(name='A', numpy_array=np.zeros(1)))",
            "name": "tensor('A').name()",
            "empty name": "raises(lambda: tensor(''))",
            "dtype": "raises(lambda: pb_utils.Tensor('A', np.zeros(1, np.complex64)))",
            "unicode": "raises(lambda: pb_utils.Tensor('A', np.array(['a'])))",
            "None": "raises(lambda: pb_utils.Tensor('A', None))",
            "shape": "type(tensor().shape()).__name__, tensor().shape()",
            "is_cpu": "tensor().is_cpu()",
            "triton_dtype": "raises(lambda: tensor().triton_dtype())",
            "strings": "tensor('A', [b'a', b'b'], object)",
            "text": "tensor('A', ['a', 'b'], object)",
            "not contiguous": "pb_utils.Tensor('A', np.arange(12).reshape(3, 4)[::2, 1:])",
            "every type": (
                "[pb_utils.Tensor('A', np.ones(2, pb_utils.triton_to_numpy_type(number))).as_numpy()"
                ".dtype.name for number in range(1, 13)]"
            ),
        },
    ),
    *_cases(
        "1.4",
        "DLPack",
        {
            "capsule": "'dltensor' in repr(tensor().to_dlpack())",
            "device": "[int(number) for number in tensor().__dlpack_device__()]",
            "round trip": "pb_utils.Tensor.from_dlpack('B', tensor().to_dlpack())",
            "from a capsule": (
                "pb_utils.Tensor.from_dlpack('B', np.arange(3, dtype=np.int16).__dlpack__())"
            ),
            "from an object": "pb_utils.Tensor.from_dlpack('B', np.arange(3, dtype=np.int16))",
            "to NumPy": "np.from_dlpack(tensor())",
            "bool": "pb_utils.Tensor.from_dlpack('B', tensor('A', [True, False], bool).to_dlpack())",
            "strings": "raises(lambda: tensor('A', [b'a'], object).to_dlpack())",
            "something else": "raises(lambda: pb_utils.Tensor.from_dlpack('B', 3))",
            "not contiguous": (
                "raises(lambda: pb_utils.Tensor.from_dlpack("
                "'B', np.arange(12).reshape(3, 4)[:, ::2].__dlpack__()))"
            ),
            "empty name": "raises(lambda: pb_utils.Tensor.from_dlpack('', tensor().to_dlpack()))",
            "stride of a dim of one": (
                "pb_utils.Tensor.from_dlpack('B', np.zeros((4, 2))[::4].__dlpack__()).shape()"
            ),
            "reference count": (
                "import sys\nt = tensor()\nbefore = sys.getrefcount(t)\nc = t.to_dlpack()\n"
                "during = sys.getrefcount(t)\ndel c\nsaid = during - before, sys.getrefcount(t) - before"
            ),
            "used up": (
                "c = tensor().to_dlpack()\npb_utils.Tensor.from_dlpack('B', c)\n"
                "said = 'used_dltensor' in repr(c)"
            ),
            "nothing in it": (
                "pb_utils.Tensor.from_dlpack('B', tensor('A', []).to_dlpack()).shape()"
            ),
        },
    ),
    *_cases(
        "1.5",
        "PreferredMemory",
        {
            "both": "bool(pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0))",
            "keywords": (
                "bool(pb_utils.PreferredMemory(preferred_memory_type=pb_utils.TRITONSERVER_MEMORY_GPU, "
                "preferred_device_id=0))"
            ),
            "None": "raises(lambda: pb_utils.PreferredMemory(None))",
            "in a call": (
                "request(preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)).exec()"
            ),
        },
    ),
    *_cases(
        "1.5",
        "InferenceTrace",
        {
            "of a request without one": "given.trace().get_context()",
            "class": "type(given.trace()).__name__",
            "passed on": "request(trace=given.trace()).exec()",
        },
    ),
]
CASES = [*NAMES, *FUNCTIONS, *ERRORS, *TENSORS]
