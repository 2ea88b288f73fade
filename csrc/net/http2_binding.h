// HTTP/2 connections, for Python: gpubridge/_native.pyi has the types.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "net/http2_connection.h"

namespace gpubridge::http2 {

// The memory of buffers, which it keeps.
std::vector<Segment> segments_of(const std::vector<nanobind::object>& buffers);

// A connection, and what of Python belongs to it.
class PythonConnection : public Connection {
 public:
  PythonConnection(const std::shared_ptr<GrpcMethods>& methods, const Limits& limits)
      : Connection(methods, limits) {}

  nanobind::object memory();
  nanobind::list received(std::size_t nbytes, double now);
  // Receives what a socket has of a large body in small frames, straight into its place.
  void receive_more(int descriptor, double now);
  nanobind::object flush(int descriptor);
  void receive_into(std::uint32_t stream, nanobind::handle target);

  nanobind::list events();
  // An event as Python gets it.
  nanobind::object convert(const Event& event);

 private:
  nanobind::object headers_of(const std::shared_ptr<const RequestHeaders>& headers);
  // Writes what waits for the socket; false if it does not take all.
  bool write(int descriptor);

  // The last part of the buffer that was handed out, and its view.
  Place viewed_;
  nanobind::object view_;
  // The objects of headers that repeat. They are kept, so that no other has the same address.
  std::unordered_map<const RequestHeaders*, nanobind::object> headers_;
};

}  // namespace gpubridge::http2
