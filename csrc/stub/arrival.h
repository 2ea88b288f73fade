// A request's connection to the message that it came with.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace gpubridge::stub {

// The record and the origin of a request are made when somebody asks for them: most requests are
// answered before anybody does.
struct Arrival {
  PyObject_HEAD  // NOLINT
      PyObject* message;
  std::size_t at;
  PyObject* make_origin;  // takes the message and where the record begins in it
  PyObject* origin;       // null until it was asked for
  int over;               // -1 until the request is answered; then whether it was cancelled
};

nanobind::object make_arrival(nanobind::handle message, std::size_t at,
                              nanobind::handle make_origin);

nanobind::object origin_of(Arrival* arrival);

// Notes that the request is answered.
void end_arrival(Arrival* arrival, bool cancelled);

}  // namespace gpubridge::stub
