"""Differences that a model meets here from Triton 2.51; the reference is a newer Triton."""

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ApiDifference:
    """Answers of cases here that differ from those of Triton 2.51.

    Parameters
    ----------
    what, triton, why
        The situation, what Triton 2.51 does in it, and the reason to do otherwise.
    here
        The same in words, of gpubridge.
    answers
        What is answered here, by the key of the case.
    """

    what: str
    triton: str
    here: str
    why: str
    answers: dict[str, str]


_TABLE = """\
`Metric.set` of a counter | the whole server dies | the error that is in its text | a model's mistake is
no reason to end others
    1.11 counter: set = 200 ['c_python_backend_utils.TritonModelException', "Failed to set metric value:
        Failed to process the request for model 'api_0', message: TRITONSERVER_METRIC_KIND_COUNTER does
        not support Set"]
`Tensor.triton_dtype()` | TypeError | the number of the type | it is what the name says
    1.4 Tensor: triton_dtype = 200 ['no error', 11]
`Tensor.from_dlpack` of a NumPy array | the model's process dies | a tensor | a crash is no answer
    1.4 DLPack: from a capsule = 200 ['B', ['int16', [0, 1, 2]]]
    1.4 DLPack: from an object = 200 ['B', ['int16', [0, 1, 2]]]
    1.4 DLPack: stride of a dim of one = 200 [1, 2]
a DLPack capsule that `from_dlpack` has used | keeps its name | is called `used_dltensor` | DLPack asks
for that, and newer Tritons do it
    1.4 DLPack: used up = 200 True
the code of an error that a called model answers | INTERNAL, whatever it was | the code that it gave |
callers decide by it
    1.6 exec: model answers an error = 200 '__ErrorCode.NOT_FOUND minus two'
    1.9 ResponseIterator: error = 200 ['__ErrorCode.NOT_FOUND minus two']
`async_exec` in `initialize`, without an event loop | RuntimeError: no running event loop | the text for
calls outside of `execute` | a loop would not help
    1.6 exec: before execute, async = 200 ['c_python_backend_utils.TritonModelException', "BLS is only
        supported during the 'execute' function."]
`InferenceResponse(parameters=…)` | TypeError | response parameters | newer Tritons have them
    1.7 InferenceResponse: parameters = 200 {'a': 1}
    1.7 InferenceResponse: parameters key = 200 ['c_python_backend_utils.TritonModelException', "Expect
        parameters keys to have type str, found type <class 'int'>"]
    1.7 InferenceResponse: parameters value = 200 ['c_python_backend_utils.TritonModelException',
        "Expect parameters values to have type bool/int/str, found type <class 'float'>"]
`ResponseIterator.cancel()` | AttributeError | cancels; the called model decides what it still sends |
newer Tritons have it
    1.9 ResponseIterator: cancel = 200 ([['SAID', ['object', [b'begun']]]], [[['SAID', ['object',
        [b'stopped']]]]])
a call of a model or version that does not exist | `Model 'NAME' is not ready.` | `Request for unknown
model: 'NAME' is not found` | newer Tritons say that
    1.6 exec: unknown model = 200 "Model nope - Error when running inference: Request for unknown model:
        'nope' is not found"
    1.6 exec: unknown version = 200 "Model api_add - Error when running inference: Request for unknown
        model: 'api_add' version 7 is not found"
    1.9 ResponseIterator: unknown model = 200 ["Model nope - Error when running inference: Request for
        unknown model: 'nope' is not found"]
a call that asks for an output that is not there | names it | the same, and the outputs that there are |
it says what to correct
    1.6 exec: unknown output = 200 "Model api_add - Error when running inference: unexpected inference
        output 'NOPE' for model 'api_add': its outputs are 'SUM', 'SEEN'"
"""


def _differences() -> Iterator[ApiDifference]:
    """Read differences: what, Triton, here and why; indented, what is answered; wrapped at spaces."""
    for head, answers in re.findall(r"^((?:\S.*\n)+)((?: .*\n)+)", _TABLE, re.MULTILINE):
        each = (
            " ".join(text.split()).split(" = ", 1) for text in re.split(r"\n {4}(?! )", answers)
        )
        yield ApiDifference(*" ".join(head.split()).split(" | "), dict(each))


DIFFERENCES = tuple(_differences())
