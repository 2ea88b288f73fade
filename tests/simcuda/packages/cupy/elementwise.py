"""Elementwise kernels of CuPy's double: their source, compiled for the host."""

import ctypes
import functools
import importlib.util
import struct
import tempfile
from pathlib import Path

import numpy as np
from cuda.bindings import driver

import cupy
from cupy.cuda import get_current_stream, ok

_TYPES = {"float32": "float", "int32": "int", "uint8": "unsigned char"}
_MOST_DIMS = 4
_SOURCE = """
#include <algorithm>
#include <cmath>
#include <cstddef>

#define __device__
using std::max;
using std::min;

template <typename T>
class CArray {{
 public:
  explicit CArray(const long long*& words) {{
    data_ = reinterpret_cast<char*>(*words++);
    ndim_ = *words++;
    for (int k = 0; k < {dims}; ++k) shape_[k] = *words++;
    for (int k = 0; k < {dims}; ++k) strides_[k] = *words++;
  }}
  const ptrdiff_t* shape() const {{ return shape_; }}
  ptrdiff_t size() const {{
    ptrdiff_t count = 1;
    for (int k = 0; k < ndim_; ++k) count *= shape_[k];
    return count;
  }}
  template <typename Int, std::size_t N>
  T& operator[](const Int (&index)[N]) const {{
    ptrdiff_t at = 0;
    for (std::size_t k = 0; k < N; ++k) {{
      if (index[k] < 0 || index[k] >= shape_[k]) __builtin_trap();
      at += index[k] * strides_[k];
    }}
    return *reinterpret_cast<T*>(data_ + at);
  }}
  T& operator[](ptrdiff_t index) const {{
    if (index < 0 || index >= size()) __builtin_trap();
    ptrdiff_t at = 0;
    for (int k = ndim_; k-- > 0; index /= shape_[k]) at += index % shape_[k] * strides_[k];
    return *reinterpret_cast<T*>(data_ + at);
  }}

 private:
  char* data_;
  int ndim_;
  ptrdiff_t shape_[{dims}], strides_[{dims}];
}};

template <typename T>
T number(const long long*& words) {{
  return static_cast<T>(reinterpret_cast<const double&>(*words++));
}}

{preamble}

extern "C" __attribute__((visibility("default"))) void run(void* packed) {{
  const long long* words = static_cast<const long long*>(packed);
  {arguments}
  for (ptrdiff_t i = 0; i < {last}.size(); ++i) {{
    {elements}
    {operation};
  }}
}}
"""


@functools.cache
def _builder():
    found = importlib.util.spec_from_file_location(
        "simcuda_build", Path(__file__).parents[2] / "build.py"
    )
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class _Parameter:
    def __init__(self, text):
        *raw, self.type, self.name = text.split()
        self.raw = raw == ["raw"]


class ElementwiseKernel:
    """A kernel that makes one element of its output at a time."""

    def __init__(self, in_params, out_params, operation, name="kernel", preamble=""):
        inputs, outputs = (
            [_Parameter(text) for text in given.split(",")] for given in (in_params, out_params)
        )
        assert len(outputs) == 1
        self._parameters = [*inputs, *outputs]
        self._operation, self._preamble, self._name = operation, preamble, name
        self._functions = {}

    def __call__(self, *arguments):
        if len(arguments) < len(self._parameters):
            arguments = (*arguments, cupy.empty(arguments[0].shape, np.float32))
        stream = get_current_stream()
        words, out = b"", arguments[-1]
        for number, (parameter, given) in enumerate(zip(self._parameters, arguments, strict=True)):
            if not isinstance(given, cupy.ndarray):
                words += struct.pack("=d", given)
                continue
            assert parameter.type == given.dtype.name
            assert parameter.raw or given.shape == out.shape
            copy = stream.staging(number, given.span)
            if given.span:
                ok(driver.cuMemcpyDtoHAsync(copy, given.data.ptr, given.span, stream.ptr))
            padding = [0] * (_MOST_DIMS - len(given.shape))
            fields = [copy, len(given.shape), *given.shape, *padding, *given.strides, *padding]
            words += struct.pack(f"={len(fields)}q", *fields)
        packed = ctypes.create_string_buffer(words)
        stream.launched.append(packed)
        function = self._compiled(tuple(isinstance(given, cupy.ndarray) for given in arguments))
        ok(driver.cuLaunchHostFunc(stream.ptr, function, ctypes.addressof(packed)))
        if out.span:
            ok(driver.cuMemcpyHtoDAsync(out.data.ptr, copy, out.span, stream.ptr))
        return out

    def _compiled(self, arrays):
        if arrays in self._functions:
            return self._functions[arrays]
        arguments, elements = "", ""
        for parameter, is_array in zip(self._parameters, arrays, strict=True):
            kind, name = _TYPES[parameter.type], parameter.name
            if parameter.raw:
                arguments += f"const CArray<{kind}> {name}(words);\n"
            elif is_array:
                arguments += f"const CArray<{kind}> _raw_{name}(words);\n"
                elements += f"{kind}& {name} = _raw_{name}[i];\n"
            else:
                arguments += f"const {kind} {name} = number<{kind}>(words);\n"
        text = _SOURCE.format(
            dims=_MOST_DIMS, preamble=self._preamble, arguments=arguments, elements=elements,
            operation=self._operation, last=f"_raw_{self._parameters[-1].name}",
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / f"{self._name}.cpp"
            source.write_text(text)
            built = _builder().build_library(f"lib{self._name}.so", [source], [source], ["-O2"])
        function = ctypes.cast(ctypes.CDLL(str(built)).run, ctypes.c_void_p).value
        return self._functions.setdefault(arrays, function)
