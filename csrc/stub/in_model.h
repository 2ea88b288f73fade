// The time in which the model's code runs.
#pragma once

#include "python_object.h"

namespace gpubridge::stub {

// While one exists, signals reach the handlers that the model has set: `signals` is a
// SignalHandlers (gpubridge/stub/signal_handlers.py). Only of the thread that executes, which runs
// handlers.
class InModel {
 public:
  explicit InModel(nb::handle signals) : signals_(signals) { set(Py_True); }
  ~InModel() { set(Py_False); }
  InModel(const InModel&) = delete;
  InModel& operator=(const InModel&) = delete;

 private:
  // Runs no Python code: no handler can come between this and the call of the model.
  void set(PyObject* value) {
    if (PyObject_SetAttr(signals_.ptr(), name_object<"in_model">(), value) != 0) PyErr_Clear();
  }

  nb::handle signals_;
};

}  // namespace gpubridge::stub
