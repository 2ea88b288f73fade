// HTTP/2 connections, for Python: gpubridge/_native.pyi has the types.
#pragma once

#include "buffer_view.h"
#include "heap_type.h"
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

// Headers as Python gets them.
inline nb::object headers_object(const std::shared_ptr<const RequestHeaders>& headers) {
  return nb::cast(std::const_pointer_cast<RequestHeaders>(headers));
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
  // The same; where there is no memory for it, its call has failed.
  nb::object told(const Event& event);

  int traverse(visitproc visit, void* arg) const { return visit_all({&view_}, visit, arg); }
  void clear() { drop_all({&view_}); }

 private:
  // Writes what waits for the socket; false if it does not take all.
  [[nodiscard]] bool write(int descriptor);

  // The last part of the buffer that was handed out, and its view.
  Place viewed_;
  nb::object view_ = nb::none();
};

}  // namespace gpubridge::http2
