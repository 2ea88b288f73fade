#include "stub/arrival.h"

#include <utility>

#include "stub/heap_type.h"

namespace nb = nanobind;

namespace gpubridge::stub {
namespace {

void deallocate_arrival(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  auto* arrival = as<Arrival>(self);
  Py_CLEAR(arrival->message);
  Py_CLEAR(arrival->make_origin);
  Py_CLEAR(arrival->origin);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {// NOLINT: the C API's own form
                       {Py_tp_dealloc, slot(deallocate_arrival)},
                       {0, nullptr}};

PyType_Spec spec = {"gpubridge._native.Arrival", sizeof(Arrival), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

nb::object make_arrival(nb::handle message, std::size_t at, nb::handle make_origin) {
  static auto* const type =
      reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)).release().ptr());
  auto* arrival = PyObject_New(Arrival, type);
  if (arrival == nullptr) throw nb::python_error();
  arrival->message = Py_NewRef(message.ptr());
  arrival->at = at;
  arrival->make_origin = Py_NewRef(make_origin.ptr());
  arrival->origin = nullptr;
  arrival->over = -1;
  return nb::steal(reinterpret_cast<PyObject*>(arrival));
}

nb::object origin_of(Arrival* arrival) {
  if (arrival->origin == nullptr) {
    nb::object made = nb::handle(arrival->make_origin)(nb::handle(arrival->message), arrival->at);
    if (arrival->origin == nullptr) {
      if (arrival->over >= 0) made.attr("over") = arrival->over != 0;
      arrival->origin = made.release().ptr();
    } else {
      // Another thread was first: the end of this one is not that of the request.
      made.attr("close")();
    }
  }
  return nb::borrow(arrival->origin);
}

void end_arrival(Arrival* arrival, bool cancelled) {
  arrival->over = cancelled ? 1 : 0;
  if (arrival->origin != nullptr) nb::handle(arrival->origin).attr("over") = cancelled;
}

}  // namespace gpubridge::stub
