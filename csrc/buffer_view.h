// A Py_buffer that is released with its scope.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace gpubridge {

class BufferView {
 public:
  BufferView(nanobind::handle exporter, int flags) {
    if (PyObject_GetBuffer(exporter.ptr(), &view_, flags) != 0) {
      throw nanobind::python_error();
    }
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  [[nodiscard]] void* data() const { return view_.buf; }
  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(view_.len); }
  [[nodiscard]] const char* format() const { return view_.format; }
  [[nodiscard]] bool read_only() const { return view_.readonly != 0; }

 private:
  Py_buffer view_{};
};

}  // namespace gpubridge
