// HTTP/2 connections, for Python: gpubridge/_native.pyi has the types.
#pragma once

#include "buffer_view.h"
#include "net/http2_connection.h"
#include "python_object.h"

namespace gpubridge::http2 {

// The memory of buffers, which it keeps.
template <typename Buffers>
std::vector<Segment> segments_of(const Buffers& buffers) {
  std::vector<Segment> segments;
  for (const nb::handle buffer : buffers) {
    auto view = std::make_shared<const BufferView>(buffer, PyBUF_SIMPLE);
    segments.push_back(
        {static_cast<const std::uint8_t*>(view->data()), view->size(), std::move(view)});
  }
  return segments;
}

// A connection, and what of Python belongs to it.
class PythonConnection : public Connection {
 public:
  PythonConnection(const std::shared_ptr<GrpcMethods>& methods, const Limits& limits)
      : Connection(methods, limits) {}

  nb::object memory();
  nb::list received(std::size_t nbytes, double now) {
    Connection::received(nbytes, now);
    return events();
  }
  // Receives what a socket has of a large body in small frames, straight into its place.
  void receive_more(int descriptor, double now);
  nb::object flush(int descriptor);
  void receive_into(std::uint32_t stream, nb::handle target);

  nb::list events();
  // An event as Python gets it.
  nb::object convert(const Event& event);
  nb::object headers_of(const std::shared_ptr<const RequestHeaders>& headers);

 private:
  // Writes what waits for the socket; false if it does not take all.
  [[nodiscard]] bool write(int descriptor);

  // The last part of the buffer that was handed out, and its view.
  Place viewed_;
  nb::object view_;
  // The objects of headers that repeat. They are kept, so that no other has the same address.
  std::unordered_map<const RequestHeaders*, nb::object> headers_;
};

}  // namespace gpubridge::http2
