#include "net/http2_binding.h"

#include <limits.h>
#include <sys/uio.h>

#include "memory/lease_book.h"
#include "net/access_log_binding.h"
#include "net/http2_connection.h"

namespace gpubridge {
namespace {

using http2::Event;
using http2::EventKind;
using http2::Limits;
using http2::Place;
using http2::PythonConnection;
using http2::Segment;

// One call takes or sends so much of a connection's bytes; then others have their turn.
constexpr int kTurns = 4;
// The interpreter's lock is let go for a larger write.
constexpr std::size_t kLongWrite = std::size_t{1} << 16U;

// A view of memory of the plane, or of a caller, which it keeps.
nb::object memory_view(std::shared_ptr<const void> owner, const std::uint8_t* data,
                       std::size_t size, bool read_only) {
  char* const begin = reinterpret_cast<char*>(const_cast<std::uint8_t*>(data));
  return LentSpan{std::move(owner), begin, size, read_only}.object();
}

using SharedFields = std::shared_ptr<HeaderFields>;

}  // namespace

namespace http2 {

nb::object PythonConnection::memory() {
  Place place = Connection::memory();
  if (place.owner != nullptr) {
    return memory_view(std::move(place.owner), place.data, place.size, false);
  }
  // Most often it is all of the buffer.
  if (place.data != viewed_.data || place.size != viewed_.size) {
    viewed_ = {place.data, place.size, nullptr};
    view_ = memory_view(buffer(), place.data, place.size, false);
  }
  return view_;
}

void PythonConnection::receive_more(int descriptor, double now) {
  for (int turn = 0; turn < kTurns && !has_events(); ++turn) {
    const std::span<const iovec> places = this->places();
    if (places.empty()) break;
    ssize_t nbytes = 0;
    {
      const nb::gil_scoped_release unlocked;
      nbytes = readv(descriptor, places.data(), static_cast<int>(places.size()));
    }
    // The transport meets the same error, or end, and knows what to do.
    const auto came = static_cast<std::size_t>(std::max<ssize_t>(nbytes, 0));
    const bool full = came == places_size();
    placed(came, now);
    if (!full) break;
  }
}

nb::object PythonConnection::flush(int descriptor) {
  nb::list left;
  bool more = false;
  for (int turn = 0; output().fill(); ++turn) {
    if (turn == kTurns) {
      more = true;
      break;
    }
    if (!write(descriptor)) {
      for (Segment& segment : output().take_all()) {
        left.append(memory_view(std::move(segment.owner), segment.data, segment.size, true));
      }
      break;
    }
  }
  if (left.size() == 0 && !more && !has_events() && !closed()) {
    return nb::none();
  }
  return nb::make_tuple(left, events(), more);
}

void PythonConnection::receive_into(std::uint32_t stream, nb::handle target) {
  auto view = std::make_shared<const BufferView>(target, PyBUF_WRITABLE);
  Connection::receive_into(
      stream, {static_cast<std::uint8_t*>(view->data()), view->size(), std::move(view)});
}

bool PythonConnection::write(int descriptor) {
  if (descriptor < 0) return false;
  std::array<iovec, IOV_MAX> pieces;
  const std::size_t count = output().gather(pieces);
  std::size_t size = 0;
  for (std::size_t index = 0; index < count; ++index) size += pieces[index].iov_len;
  ssize_t sent = 0;
  if (size > kLongWrite) {
    const nb::gil_scoped_release unlocked;
    sent = writev(descriptor, pieces.data(), static_cast<int>(count));
  } else {
    sent = writev(descriptor, pieces.data(), static_cast<int>(count));
  }
  // The transport meets the same error, and knows what to do.
  const auto taken = static_cast<std::size_t>(std::max<ssize_t>(sent, 0));
  output().sent(taken);
  return taken == size;
}

nb::object PythonConnection::told(const Event& event) {
  nb::object made;
  attempt([&] { made = convert(event); },
          [&](const nb::object& error) {
            if (PyErr_GivenExceptionMatches(error.ptr(), PyExc_MemoryError) == 0) {
              PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
              throw nb::python_error();
            }
            made = nb::make_tuple(static_cast<int>(EventKind::kFailed), event.stream,
                                  static_cast<int>(FramingFault::kNoMemory), 0, 0);
          });
  return made;
}

nb::object PythonConnection::convert(const Event& event) {
  const int kind = static_cast<int>(event.kind);
  switch (event.kind) {
    case EventKind::kCall:
      return nb::make_tuple(
          kind, event.stream, event.headers->method(), headers_object(event.headers),
          bytes_object(http2::text_of(event.messages.front().bytes())), event.compressed);
    case EventKind::kBegin:
      return nb::make_tuple(kind, event.stream, event.headers->method(),
                            headers_object(event.headers), event.end);
    case EventKind::kMessages: {
      nb::list messages;
      for (const http2::Message& message : event.messages)
        messages.append(bytes_object(http2::text_of(message.bytes())));
      return nb::make_tuple(kind, event.stream, event.value, messages, event.compressed, event.end);
    }
    case EventKind::kData:
      return nb::make_tuple(
          kind, event.stream,
          memory_view(received_memory(), event.data.data(), event.data.size(), true), event.end);
    case EventKind::kFilled:
      return nb::make_tuple(kind, event.stream, event.end);
    case EventKind::kFailed:
      return nb::make_tuple(kind, event.stream, static_cast<int>(event.fault), event.value,
                            event.limit);
    case EventKind::kLarge:
      return nb::make_tuple(kind, event.stream, event.value, event.compressed);
    case EventKind::kReset:
      return nb::make_tuple(kind, event.stream, event.code);
    case EventKind::kPong:
      return nb::make_tuple(kind, event.stream, bytes_object(event.text));
    case EventKind::kClosed:
      return nb::make_tuple(kind, event.stream, event.code, event.text);
    default:
      return nb::make_tuple(kind, event.stream);
  }
}

nb::list PythonConnection::events() {
  nb::list events;
  for (const Event& event : take_events()) events.append(told(event));
  return events;
}

}  // namespace http2

namespace {

std::vector<std::pair<std::string, std::string>> fields_of(nb::handle fields) {
  std::vector<std::pair<std::string, std::string>> made;
  for (const nb::handle field : fields) {
    const auto [name, value] = nb::cast<std::pair<nb::bytes, nb::bytes>>(field);
    made.emplace_back(view_of(name), view_of(value));
  }
  return made;
}

std::vector<std::string> texts_of(nb::handle values) {
  std::vector<std::string> texts;
  for (const nb::handle value : values) texts.emplace_back(view_of(nb::cast<nb::bytes>(value)));
  return texts;
}

std::shared_ptr<GrpcMethods> methods_of(nb::handle methods) {
  auto made = std::make_shared<GrpcMethods>();
  for (const nb::handle method : methods) {
    const auto parts = nb::cast<nb::tuple>(method);
    const int kind = nb::cast<int>(parts[1]);
    if (kind < 0 || kind > static_cast<int>(GrpcKind::kControl)) {
      throw nb::value_error("expected a kind of method");
    }
    made->add(std::string(view_of(nb::cast<nb::bytes>(parts[0]))),
              {static_cast<GrpcKind>(kind), nb::cast<std::uint64_t>(parts[2])});
  }
  return made;
}

void bind_headers(nb::module_& module) {
  nb::class_<HeaderFields>(module, "HeaderFields")
      .def(nb::new_([](nb::handle fields, bool repeat) {
             return std::make_shared<HeaderFields>(fields_of(fields), repeat);
           }),
           nb::arg("fields"), nb::arg("repeat") = false);
  nb::class_<RequiredField>(module, "RequiredField")
      .def(nb::new_([](const nb::bytes& name, nb::handle values) {
             return std::make_shared<RequiredField>(std::string(view_of(name)), texts_of(values));
           }),
           nb::arg("name"), nb::arg("values"))
      .def("set_values",
           [](RequiredField& self, nb::handle values) { self.set_values(texts_of(values)); })
      .def("admits", [](const RequiredField& self, const nb::bytes& given) {
        return self.admits(view_of(given));
      });
  nb::class_<RequestHeaders>(module, "RequestHeaders")
      .def_prop_ro("path", [](const RequestHeaders& self) { return bytes_object(self.path()); })
      .def_prop_ro("plain", &RequestHeaders::plain)
      .def_prop_ro("admitted", &RequestHeaders::admitted)
      .def_prop_ro("coding", [](const RequestHeaders& self) { return bytes_object(self.coding()); })
      .def_prop_ro("accepted_codings",
                   [](const RequestHeaders& self) { return bytes_object(self.accepted_codings()); })
      .def_prop_ro("timeout",
                   [](const RequestHeaders& self) -> nb::object {
                     if (!self.timeout()) return nb::none();
                     return bytes_object(*self.timeout());
                   })
      .def_prop_ro("fields", [](const RequestHeaders& self) {
        nb::list fields;
        for (std::size_t index = 0; index < self.fields().count(); ++index) {
          fields.append(nb::make_tuple(bytes_object(self.fields().name(index)),
                                       bytes_object(self.fields().value(index))));
        }
        return nb::tuple(fields);
      });
}

void bind_settings(nb::module_& module) {
  nb::class_<Limits>(module, "Http2Limits")
      .def(nb::init<>())
      .def_rw("max_concurrent_streams", &Limits::max_concurrent_streams)
      .def_rw("max_frame_size", &Limits::max_frame_size)
      .def_rw("stream_window", &Limits::stream_window)
      .def_rw("connection_window", &Limits::connection_window)
      .def_rw("header_list_bytes", &Limits::header_list_bytes)
      .def_rw("receive_bytes", &Limits::receive_bytes)
      .def_rw("unsent_control_frames", &Limits::unsent_control_frames)
      .def_rw("resets", &Limits::resets)
      .def_rw("resets_per_second", &Limits::resets_per_second)
      .def_rw("idle_frames", &Limits::idle_frames)
      .def_rw("idle_frames_per_second", &Limits::idle_frames_per_second);
  nb::class_<GrpcMethods>(module, "GrpcMethods")
      .def(nb::new_(&methods_of), nb::arg("methods"))
      .def_prop_ro("counts", &GrpcMethods::counts)
      .def("require", [](GrpcMethods& self, int number, std::shared_ptr<RequiredField> field) {
        self.require(number, std::move(field));
      });
}

void bind_connection(nb::module_& module) {
  using Self = PythonConnection;
  nb::class_<Self> kind(module, "Http2Connection", nb::type_slots(collected<Self>()));
  kind.def(nb::init<const std::shared_ptr<GrpcMethods>&, const Limits&>(), nb::arg("methods"),
           nb::arg("limits"));
  kind.def("memory", &Self::memory);
  kind.def("received", &Self::received);
  kind.def("receive_more", [](Self& self, int descriptor, double now) {
    self.receive_more(descriptor, now);
    return self.events();
  });
  kind.def("flush", &Self::flush);
  kind.def("end_input", [](Self& self) {
    self.end_input();
    return self.events();
  });
  kind.def("lost", &Self::lost);
  kind.def_prop_ro("closed", &Self::closed);
  kind.def_prop_ro("started", &Self::started);
  kind.def_prop_ro("highest_stream", &Self::highest_stream);
  kind.def_prop_ro("frames_sent", &Self::frames_sent);
  kind.def_prop_ro("open_streams", &Self::open_streams);
  kind.def_prop_ro("kept", &Self::kept);
  kind.def_prop_ro("open_block", &Self::open_block);
  kind.def_prop_ro("heard", &Self::heard);
  kind.def("unfinished", &Self::unfinished);
  kind.def("receive_into", &Self::receive_into);
  kind.def("missing", &Self::missing);
  kind.def("copied", &Self::copied);
  kind.def("keep", &Self::keep);
  kind.def("throttle", &Self::throttle);
  kind.def("consume", &Self::consume);
  kind.def("send_headers", &Self::send_headers, nb::arg("stream"), nb::arg("fields"),
           nb::arg("end") = false);
  kind.def(
      "send_data",
      [](Self& self, std::uint32_t id, nb::handle buffers, bool end) {
        self.send_data(id, http2::segments_of(buffers), end);
      },
      nb::arg("stream"), nb::arg("buffers"), nb::arg("end") = false);
  kind.def("send_response", [](Self& self, std::uint32_t id, const SharedFields& headers,
                               nb::handle body, const SharedFields& trailers) {
    self.send_response(id, headers, http2::segments_of(body), trailers);
  });
  kind.def("set_client", &Self::set_client);
  kind.def("number", [](Self& self, std::uint32_t id) {
    const AccessRecord* record = self.access(id);
    return record == nullptr ? 0 : record->number;
  });
  kind.def(
      "begin_request",
      [](Self& self, std::uint32_t id, std::uint64_t received) -> std::optional<RequestRecord> {
        auto record = self.begin_request(id, received);
        if (record == nullptr) return std::nullopt;
        return RequestRecord(self.access_log(), std::move(record));
      });
  kind.def("note", [](Self& self, std::uint32_t id, nb::handle statistics, std::string identifier) {
    if (AccessRecord* record = self.access(id)) {
      note_model(*record, statistics);
      record->identifier = std::move(identifier);
    }
  });
  kind.def("held_back", &Self::held_back);
  kind.def("queued", &Self::queued);
  kind.def_prop_ro("all_queued", &Self::all_queued);
  kind.def("reset", &Self::reset);
  kind.def("ping", [](Self& self, const nb::bytes& payload) {
    if (payload.size() != 8) throw nb::value_error("expected 8 bytes");
    self.ping(view_of(payload));
  });
  kind.def("drain", &Self::drain);
  kind.def("goaway", &Self::goaway);
  kind.def("close", [](Self& self, std::uint32_t code, const std::string& text) {
    self.close(static_cast<http2::ErrorCode>(code), text);
  });
}

}  // namespace

void bind_http2(nb::module_& module) {
  bind_headers(module);
  bind_settings(module);
  bind_connection(module);
}

}  // namespace gpubridge
