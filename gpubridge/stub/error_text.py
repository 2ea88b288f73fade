"""Texts of exceptions of a model: in Triton's form, and with a hint where a tensor was not found."""

from __future__ import annotations

import contextlib
import os
import re
import traceback

from gpubridge.errors import listed
from gpubridge.pb_utils import InferenceRequest, Tensor


def model_error_text(error: BaseException) -> str:
    """Describe a model's exception in Triton's form: the error, then its frames, innermost first.

    Where it used None as a tensor, the inputs of the request follow.
    """
    return _in_tritons_form(error) + _hint(error)


def _in_tritons_form(error: BaseException) -> str:
    try:
        message = str(error) or _EMPTY
    except BaseException as another:
        text = _described(error, "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>")
        return (
            f"{text}\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: {_described(another, _text(another))}"
        )
    return _described(error, message)


def _text(error: BaseException) -> str:
    try:
        return str(error) or _EMPTY
    except BaseException:
        return "<MESSAGE UNAVAILABLE>"


def _described(error: BaseException, message: str) -> str:
    text = f"{type(error).__name__}: {message}"
    if isinstance(error, SyntaxError) and error.text:
        # The line, and the position in it.
        shown = traceback.format_exception_only(type(error), error)[1:-1]
        text = f"{text}\n{''.join(shown).rstrip()}"
    # Not extract_tb, which reads the source files.
    places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    shown = [
        f"  {code.co_filename}({line}): {code.co_name}\n"
        for code, line in reversed(places)
        if not code.co_filename.startswith(_NOT_THE_MODEL) or code.co_filename.startswith(_BACKENDS)
    ]
    return f"{text}\n\nAt:\n{''.join(shown)}" if shown else text


_EMPTY = "<EMPTY MESSAGE>"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_MODEL = (_PACKAGE, "<frozen importlib.")
_BACKENDS = os.path.join(_PACKAGE, "backends", "")


_OF_NONE = re.compile(r"'NoneType' object has no attribute '(\w+)'")


def _hint(error: BaseException) -> str:
    """Say which inputs there are where a model used a tensor that its request does not have."""
    found = _OF_NONE.fullmatch(_text(error)) if type(error) is AttributeError else None
    if found is None or not hasattr(Tensor, found[1]):
        return ""
    text = "get_input_tensor_by_name and get_output_tensor_by_name return None for a name that is not there"
    inputs = _inputs_at(error)
    return f"\n{text}" + (f"; the request has the inputs {listed(inputs)}" if inputs else "")


def _inputs_at(error: BaseException) -> list[str]:
    """Return the names of the inputs of the request that the failed code had at hand, innermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            # Not isinstance, which would run code of the value.
            if issubclass(type(value), InferenceRequest):
                with contextlib.suppress(Exception):
                    return [tensor.name() for tensor in value.inputs()]
    return []
