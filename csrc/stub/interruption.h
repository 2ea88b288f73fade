// What the handler of a signal raises while the stub runs nothing of the model's.
#pragma once

#include "python_object.h"

namespace gpubridge::stub {

// Keeps that for the next batch, in an Interruption (gpubridge/stub/interruption.py). Only of the
// thread that executes, which is the one that runs handlers.
class Interruption {
 public:
  explicit Interruption(nb::object interruption)
      : interruption_(std::move(interruption)),
        keeps_(nb::cast<bool>(interruption_.attr("keeps"))) {}

  // Runs what is part of no batch, and raises nothing by itself.
  template <typename Function>
  void apart(Function&& function) {
    try {
      std::forward<Function>(function)();
    } catch (nb::python_error& error) {
      if (!keeps_) throw;
      // By no method: the handler of the next signal could raise there.
      if (!pending()) interruption_.attr("error") = error.value();
    }
  }

  // Runs the handlers of the signals that have come.
  void run_handlers() {
    apart([] {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    });
  }

  // True if there is an exception for the next batch.
  [[nodiscard]] bool pending() const { return !interruption_.attr("error").is_none(); }

 private:
  nb::object interruption_;
  bool keeps_;
};

}  // namespace gpubridge::stub
