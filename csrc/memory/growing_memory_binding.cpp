// Memory of a body that is on its way, for Python: gpubridge/_native.pyi has the type.

#include "buffer_view.h"
#include "heap_type.h"
#include "memory/growing_memory.h"
#include "memory/lease_book.h"

namespace gpubridge {
namespace {

// Grows in place where nobody looks at it. Views keep the memory that they were made of: then it
// grows elsewhere.
class SharedMemory {
 public:
  explicit SharedMemory(std::uint64_t nbytes) : nbytes_(nbytes) {}

  void resize(std::size_t size) {
    if (memory_.use_count() > 1) {
      auto moved = std::make_shared<GrowingMemory>();
      moved->resize(size);
      copy_bytes(moved->data(), memory_->data(), std::min(size, memory_->size()));
      memory_ = std::move(moved);
    } else {
      memory_->resize(size);
    }
  }
  [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }
  [[nodiscard]] nb::object view() const {
    return LentSpan{memory_, memory_->data(), memory_->size(), false}.object();
  }

 private:
  std::uint64_t nbytes_;
  std::shared_ptr<GrowingMemory> memory_ = std::make_shared<GrowingMemory>();
};

// Exports what there is by now, as a view of it does.
int export_memory(PyObject* self, Py_buffer* exported, int flags) {
  return guarded(-1, [&] {
    if (!nb::inst_ready(self)) throw nb::buffer_error("there is no memory");
    return PyObject_GetBuffer(nb::inst_ptr<SharedMemory>(self)->view().ptr(), exported, flags);
  });
}

}  // namespace

void bind_growing_memory(nb::module_& module) {
  static PyType_Slot slots[] = {// NOLINT: the C API's own form
                                {Py_bf_getbuffer, slot(export_memory)},
                                {0, nullptr}};
  nb::class_<SharedMemory>(module, "GrowingMemory", nb::type_slots(slots))
      .def(nb::init<std::uint64_t>())
      .def("resize", &SharedMemory::resize)
      .def("__len__", &SharedMemory::nbytes)
      .def("__getitem__", [](const SharedMemory& self, const nb::slice& part) -> nb::object {
        const nb::object view = self.view();
        return view[part];
      });
}

}  // namespace gpubridge
