// The responses of decoupled models on a stream of gRPC. Plain ones that are not the last of their
// request go to the connection without Python code; all others are for Python.

#include "heap_type.h"
#include "ipc/infer_request_binding.h"
#include "net/access_log_binding.h"
#include "net/http2_binding.h"
#include "python_object.h"
#include "request/responses_binding.h"

namespace gpubridge::http2 {

// Takes the responses of one request that are not the last: it is the request's `on_partial`.
// gpubridge/_native.pyi says what the hooks are.
class StreamResponses {
 public:
  StreamResponses(nb::object http2, std::uint32_t stream, nb::object request, nb::handle hooks)
      : http2_object_(std::move(http2)),
        http2_(&nb::cast<PythonConnection&>(http2_object_)),
        stream_(stream),
        request_(std::move(request)),
        parameters_(nb::cast<nb::bytes>(hooks.attr("parameters"))),
        most_unsent_(nb::cast<std::uint64_t>(hooks.attr("most_unsent"))),
        outgoing_(hooks.attr("outgoing")),
        template_of_(hooks.attr("template_of")),
        respond_(hooks.attr("respond")),
        flush_soon_(hooks.attr("flush_soon")),
        leave_unread_(hooks.attr("leave_unread")),
        record_(hooks.attr("record")) {}

  void answer(nb::handle outcome) {
    const std::vector<nb::object> pieces = frame(outcome);
    if (pieces.empty()) {
      nb::borrow(respond_)(outcome);
      return;
    }
    const std::vector<Segment> segments = segments_of(pieces);
    if (!record_.is_none()) {
      std::uint64_t size = 0;
      for (const Segment& segment : segments) size += segment.size;
      nb::cast<RequestRecord&>(record_).answer(size, std::nullopt);
    }
    http2_->send_data(stream_, segments, false);
    nb::borrow(flush_soon_)();
    if (http2_->queued(stream_) < most_unsent_) {
      infer_request(request_).passed_on(1);
    } else {
      nb::borrow(leave_unread_)();
    }
  }

  int traverse(visitproc visit, void* arg) const {
    return visit_all({&http2_object_, &request_, &outgoing_, &template_of_, &respond_, &flush_soon_,
                      &leave_unread_, &record_, &signature_, &template_},
                     visit, arg);
  }
  void clear() {
    drop_all({&http2_object_, &request_, &outgoing_, &template_of_, &respond_, &flush_soon_,
              &leave_unread_, &record_, &signature_, &template_});
  }

 private:
  // Returns the frame of a plain response that nothing is to be sent before; nothing for others.
  std::vector<nb::object> frame(nb::handle outcome) {
    if (!is_infer_response(outcome) || nb::len(outgoing_) != 0) return {};
    const InferResponse& response = infer_response(outcome);
    if (response.has(InferResponse::kParameters)) return {};
    try {
      const nb::handle signature = response.get(InferResponse::kSignature);
      if (!signature_.is(signature)) {
        template_ = nb::borrow(template_of_)(signature);
        signature_ = nb::borrow(signature);
      }
      if (template_.is_none()) return {};
      const nb::handle identifier = infer_request(request_).get(InferRequest::kIdentifier);
      return encode_frame(nb::cast<const MessageResponseTemplate&>(template_),
                          view_of_text(identifier), view_of(parameters_),
                          response.get(InferResponse::kShapes),
                          response.get(InferResponse::kBuffers), true, nb::tuple())
          .pieces;
    } catch (const std::exception&) {
      // The same happens to Python, which words it.
      return {};
    }
  }

  nb::object http2_object_;
  PythonConnection* http2_;
  std::uint32_t stream_;
  nb::object request_;
  nb::bytes parameters_;
  std::uint64_t most_unsent_;
  nb::object outgoing_;
  nb::object template_of_;
  nb::object respond_;
  nb::object flush_soon_;
  nb::object leave_unread_;
  nb::object record_;
  // Of the last response, since the next mostly has the same.
  nb::object signature_ = nb::none();
  nb::object template_ = nb::none();
};

}  // namespace gpubridge::http2

namespace gpubridge {

void bind_grpc_stream(nb::module_& module) {
  using http2::StreamResponses;
  nb::class_<StreamResponses>(module, "StreamResponses", nb::type_slots(called<StreamResponses>()))
      .def(nb::init<nb::object, std::uint32_t, nb::object, nb::handle>());
}

}  // namespace gpubridge
