"""Runs the code that it is sent, and answers what it has to say: an expression, or ``said``.

A response called ``answer`` is answered as it is."""

import json  # noqa: F401  (used by the code that comes)

import c_python_backend_utils  # noqa: F401
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def tensor(name="A", values=(1, 2), dtype=np.float32):
    return pb_utils.Tensor(name, np.array(values, dtype))


def request(**given):
    """A request to api_add; what is given replaces what it would have."""
    wanted = {
        "model_name": "api_add",
        "inputs": [tensor("A"), tensor("B")],
        "requested_output_names": ["SUM"],
    }
    return pb_utils.InferenceRequest(**{**wanted, **given})


def many(code, **given):
    """A request to api_many, which runs the code with ``sender``."""
    inputs = [tensor("CODE", [code], np.object_)]
    return request(model_name="api_many", inputs=inputs, requested_output_names=["SAID"], **given)


def seen(**given):
    """Return what api_add saw of a request."""
    response = request(requested_output_names=["SEEN"], **given).exec()
    return show(response)


def metric(name, kind, buckets=None):
    """A metric family, and a metric of it."""
    family = pb_utils.MetricFamily(f"api_{name}", "asked", getattr(pb_utils.MetricFamily, kind))
    return family, family.Metric(labels={"of": "api"}, buckets=buckets)


def show(value):
    if isinstance(value, pb_utils.InferenceResponse):
        if value.has_error():
            return f"{value.error().code()} {value.error().message()}"
        return [show(tensor) for tensor in value.output_tensors()]
    if isinstance(value, pb_utils.Tensor):
        return [value.name(), show(value.as_numpy())]
    if isinstance(value, pb_utils.TritonError):
        return f"{value.code()} {value.message()}"
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    return value


def raises(call):
    """The class and text of what a call raises; of a TypeError only the class."""
    try:
        return ["no error", show(call())]
    except TypeError:
        return ["TypeError"]
    except BaseException as error:
        return [f"{type(error).__module__}.{type(error).__name__}", str(error)]


def missing(names, module):
    return [name for name in names.split() if not hasattr(module, name)]


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.early = raises(lambda: request().exec())
        self.early_async = raises(lambda: request().async_exec())

    def execute(self, requests):
        return [self.answer(given) for given in requests]

    def answer(self, given):
        code = pb_utils.get_input_tensor_by_name(given, "CODE").as_numpy()[0].decode()
        names = {**globals(), "self": self, "given": given}
        try:
            compiled = compile(code, "<case>", "eval")
        except SyntaxError:
            exec(code, names)
            if "answer" in names:
                return names["answer"]
            said = names["said"]
        else:
            said = eval(compiled, names)
        return pb_utils.InferenceResponse([tensor("SAID", [repr(show(said))], np.object_)])
