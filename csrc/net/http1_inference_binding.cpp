
#include "buffer_view.h"
#include "ipc/infer_request_binding.h"
#include "net/http1_connection.h"
#include "net/http1_inference.h"
#include "python_object.h"
#include "request/responses_binding.h"

namespace gpubridge::http1 {
namespace {

// The first tensor after a header begins at a multiple of this; each later one may have to be moved
// by less than the widest item has.
constexpr std::uint64_t kAlignment = 64;
constexpr std::uint64_t kWidest = 8;

}  // namespace

nb::object InferEndpoint::allocate(std::uint64_t nbytes, nb::handle charged) const {
  const std::uint64_t size = kAlignment + nbytes + kWidest * served_->inputs;
  if (charged.is_none()) return attribute<"allocate">(arena_)(size);
  return attribute<"reserve">(arena_)(size, charged);
}

bool InferTargets::admits(const Head& head) const {
  if (required_ == nullptr) return true;
  const auto given = head.sole_field(required_->name());
  return given && required_->admits(*given);
}

std::optional<std::uint64_t> header_size(const Head& head, std::uint64_t length) {
  const auto given = head.field("inference-header-content-length");
  if (!given) return length;
  std::uint64_t size = 0;
  const char* const end = given->data() + given->size();
  const auto [at, error] = std::from_chars(given->data(), end, size);
  if (error != std::errc() || at != end || size == 0 || size > length) return std::nullopt;
  return size;
}

// The body is never at the very beginning of its slot: one that is a string gets its length before.
Inference::Inference(nb::object endpoint, std::uint64_t length, std::uint64_t header,
                     nb::handle charged)
    : Inference(endpoint, nb::cast<InferEndpoint&>(endpoint).allocate(length, charged),
                {kAlignment - header % kAlignment, length, header}) {
  large_ = !charged.is_none();
}

Inference::Inference(nb::object endpoint, nb::object slot, const InferenceBody& body)
    : endpoint_object_(std::move(endpoint)),
      endpoint_(nb::cast<InferEndpoint&>(endpoint_object_)),
      slot_(std::move(slot)),
      body_(body) {}

void Inference::put(std::string_view begin) const {
  const BufferView view(attribute<"memory">(slot_), PyBUF_WRITABLE);
  if (body_.start > view.size() || begin.size() > view.size() - body_.start) {
    throw nb::value_error("expected memory for the whole body");
  }
  if (!begin.empty())
    std::memcpy(static_cast<char*>(view.data()) + body_.start, begin.data(), begin.size());
}

std::uint64_t Inference::grow(std::uint64_t arrived) const {
  // All of the slot is handed out with the end of the body, for inputs that have to move.
  const std::uint64_t size = kAlignment + body_.length + kWidest * endpoint_.served()->inputs;
  const nb::object granted =
      attribute<"grow">(endpoint_.arena())(slot_, body_.start + arrived, size);
  return nb::cast<std::uint64_t>(granted) - body_.start;
}

bool Inference::submit(nb::handle exchange, std::uint64_t copied, nb::handle origin) {
  const std::shared_ptr<const ServedModel> served = served_ = endpoint_.served();
  copied = copied > body_.header ? copied - body_.header : 0;
  const MadeRequest made =
      served->templates.take_json({slot_, exchange, copied, endpoint_.arena()}, body_.start,
                                  body_.header, body_.length - body_.header);
  if (made.known == nullptr) return false;
  known_ = made.known;
  // Parts that cannot be shared are freed.
  slot_.reset();
  if (!made.regions.is_none()) attribute<"share">(served->given)(made.request, made.regions);
  request_ = made.request;
  if (endpoint_.generates()) {
    InferRequest& request = infer_request(request_);
    request.set(InferRequest::kOnPartial, exchange);
    request.set(InferRequest::kAccount, nb::cast<Exchange&>(exchange).account());
  }
  nb::cast<Exchange&>(exchange).submitted(made.request);
  // This may be gone when that returns.
  served->submit(made.request, origin);
  return true;
}

nb::object Inference::identifier() const {
  return nb::borrow(infer_request(request_).get(InferRequest::kIdentifier));
}

void Inference::answer_infer(Exchange& exchange, nb::handle outcome) const {
  const nb::object identifier = this->identifier();
  if (is_infer_response(outcome)) {
    const InferResponse& response = infer_response(outcome);
    const nb::handle signature = response.get(InferResponse::kSignature);
    const nb::object known = known_->answer(signature, [&] {
      return attribute<"plain_template">(served_->given)(known_->form, signature);
    });
    if (!known.is_none() && !response.has(InferResponse::kParameters)) {
      const auto& encoder = nb::cast<const JsonResponseTemplate&>(known);
      const nb::handle shapes = response.get(InferResponse::kShapes);
      if (const auto values = sent_values(encoder, shapes, response.get(InferResponse::kBuffers))) {
        const SentBuffers all(values->all);
        const ResponseOutputs outputs(shapes, all, encoder.forms());
        const std::string header = encoder.encode(view_of_text(identifier), {}, outputs.all());
        if (header.size() > kLongText) {
          attribute<"respond_text">(served_->given)(nb::find(exchange), long_bytes_object(header),
                                                    values->following);
          return;
        }
        std::optional<SentBuffers> some;
        if (!values->following.is(values->all)) some.emplace(values->following);
        exchange.respond_tensors(header, some ? *some : all, values->following);
        return;
      }
    }
  }
  attribute<"respond">(served_->given)(nb::find(exchange), known_->form, identifier, outcome);
}

void Inference::abort() {
  // The handler that answers ends the request itself.
  if (!follower_.is_none()) return;
  if (request_.is_valid()) {
    infer_request(request_).cancel();
  } else if (slot_.is_valid()) {
    attribute<"free">(endpoint_.arena())(std::exchange(slot_, {}));
  }
}

}  // namespace gpubridge::http1

namespace gpubridge {

void bind_http1_inference(nb::module_& module) {
  using http1::InferEndpoint;
  using http1::InferTargets;
  nb::class_<InferEndpoint>(module, "HttpInferEndpoint", nb::type_slots(collected<InferEndpoint>()))
      .def(
          "__init__",
          [](InferEndpoint* self, nb::object arena, unsigned kind) {
            if (kind > static_cast<unsigned>(http1::EndpointKind::kGenerateStream)) {
              throw nb::value_error("no kind of an endpoint");
            }
            new (self) InferEndpoint(std::move(arena), static_cast<http1::EndpointKind>(kind));
          },
          nb::arg(), nb::arg() = 0)
      .def_prop_ro("number", &InferEndpoint::number)
      .def_prop_ro("statistics", [](const InferEndpoint& self) { return self.served()->counters; })
      .def("set_model", &InferEndpoint::set_model);
  nb::class_<InferTargets>(module, "InferTargets", nb::type_slots(collected<InferTargets>()))
      .def(nb::init<std::shared_ptr<RequiredField>>(), nb::arg("required").none() = nb::none())
      .def("add", &InferTargets::add)
      .def("remove", &InferTargets::remove)
      .def("clear", &InferTargets::clear)
      .def("find",
           [](const InferTargets& self, const nb::bytes& target) -> nb::object {
             const nb::handle found = self.find(view_of(target));
             return found.is_valid() ? nb::borrow(found) : nb::none();
           })
      .def("__len__", &InferTargets::size);
}

}  // namespace gpubridge
