// A Py_buffer that is released with its scope, and copies of bytes.
#pragma once

#include "python_object.h"

namespace gpubridge {

class BufferView {
 public:
  BufferView(nb::handle exporter, int flags) {
    if (PyObject_GetBuffer(exporter.ptr(), &view_, flags) != 0) {
      throw nb::python_error();
    }
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(BufferView&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  [[nodiscard]] void* data() const { return view_.buf; }
  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(view_.len); }
  [[nodiscard]] std::string_view text() const { return {static_cast<const char*>(data()), size()}; }
  [[nodiscard]] const char* format() const { return view_.format; }
  // Where it was asked for.
  [[nodiscard]] std::span<const Py_ssize_t> shape() const {
    return {view_.shape, static_cast<std::size_t>(view_.ndim)};
  }
  [[nodiscard]] bool read_only() const { return view_.readonly != 0; }

 private:
  Py_buffer view_{};
};

// Copies bytes; the interpreter's other threads run meanwhile where they are many.
void copy_bytes(char* to, const void* from, std::size_t size);

}  // namespace gpubridge
