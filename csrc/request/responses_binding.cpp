#include "request/responses_binding.h"

#include "python_object.h"

namespace gpubridge {
namespace {

constexpr std::uint64_t kMessageLimit = std::uint64_t{1} << 31U;
constexpr std::uint64_t kCopiedFrame = 16384;
constexpr std::uint64_t kCopiedBuffer = 1024;

std::vector<OutputForm> forms_of(const nb::bytes& given, std::size_t outputs) {
  std::vector<OutputForm> forms;
  for (const char form : view_of(given)) {
    if (form < 0 || form > static_cast<char>(OutputForm::kJson)) {
      throw nb::value_error("no form of an output");
    }
    forms.push_back(static_cast<OutputForm>(form));
  }
  if (forms.size() != outputs) throw nb::value_error("expected one form for each output");
  return forms;
}

nb::object encode_header(const JsonResponseTemplate& response, std::string_view id,
                         const nb::bytes& parameters, nb::handle shapes, nb::handle values) {
  const ResponseOutputs outputs(shapes, SentBuffers(values), response.forms());
  return nb::make_tuple(bytes_object(response.encode(id, view_of(parameters), outputs.all())),
                        outputs.nbytes());
}

ResponseTemplate template_of(const nb::bytes& names, const std::vector<nb::bytes>& openings,
                             const nb::bytes& forms) {
  std::vector<std::string> texts(openings.size());
  std::ranges::transform(openings, texts.begin(),
                         [](const nb::bytes& text) { return std::string(view_of(text)); });
  return {std::string(view_of(names)), std::move(texts), forms_of(forms, openings.size())};
}

JsonResponseTemplate json_template(const nb::bytes& names, const std::vector<nb::bytes>& openings,
                                   const nb::bytes& forms,
                                   const std::vector<std::string>& datatypes) {
  if (datatypes.size() != openings.size()) {
    throw nb::value_error("expected one datatype for each output");
  }
  std::vector<std::optional<ElementType>> types(datatypes.size());
  std::ranges::transform(datatypes, types.begin(), json_type);
  return {template_of(names, openings, forms), std::move(types)};
}

// The elements of an output; nothing where they are more than any has.
std::optional<std::size_t> element_count(nb::handle shape) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40U;
  std::int64_t count = 1;
  for (const nb::handle each : shape) {
    const auto dim = nb::cast<std::int64_t>(each);
    if (dim < 0 || (dim != 0 && count > kMost / dim)) return std::nullopt;
    count *= dim;
  }
  return static_cast<std::size_t>(count);
}

}  // namespace

ResponseOutputs::ResponseOutputs(nb::handle shapes, const SentBuffers& values,
                                 const std::vector<OutputForm>& forms)
    : outputs_(forms.size()) {
  if (nb::len(shapes) != forms.size() || values.count() != forms.size()) {
    throw nb::value_error("expected one shape and one value for each output");
  }
  std::vector<std::size_t> ends;
  ends.reserve(forms.size());
  for (const nb::handle shape : shapes) {
    for (const nb::handle dim : shape) dims_.push_back(nb::cast<std::int64_t>(dim));
    ends.push_back(dims_.size());
  }
  std::size_t begin = 0;
  for (std::size_t index = 0; index < ends.size(); begin = ends[index++]) {
    ResponseOutput& output = outputs_[index];
    output.dims = {dims_.data() + begin, ends[index] - begin};
    if (forms[index] == OutputForm::kJson) {
      texts_.push_back(values.object(index));
      output.json = view_of(nb::cast<nb::bytes>(texts_.back()));
    } else {
      output.nbytes = values.size(index);
      nbytes_ += output.nbytes;
    }
  }
}

std::optional<SentValues> sent_values(const JsonResponseTemplate& response, nb::handle shapes,
                                      nb::handle buffers) {
  const std::vector<OutputForm>& forms = response.forms();
  if (std::ranges::find(forms, OutputForm::kJson) == forms.end()) {
    return SentValues{nb::borrow(buffers), nb::borrow(buffers)};
  }
  const SentBuffers given(buffers);
  if (given.count() != forms.size()) throw nb::value_error("expected one buffer for each output");
  nb::list all;
  nb::list following;
  std::string bytes;
  std::string text;
  std::size_t formatted = 0;
  for (std::size_t index = 0; index < forms.size(); ++index) {
    if (forms[index] != OutputForm::kJson) {
      all.append(given.object(index));
      if (forms[index] == OutputForm::kBinary) following.append(given.object(index));
      continue;
    }
    formatted += given.size(index);
    const std::optional<ElementType>& type = response.types()[index];
    const auto count = element_count(shapes[index]);
    if (formatted > kLongestJson || !type || !count) return std::nullopt;
    // A copy: the model may write to it meanwhile.
    bytes.clear();
    given.append_to(bytes, index);
    if (!format_values(bytes, *type, *count, text)) return std::nullopt;
    all.append(bytes_object(text));
  }
  return SentValues{std::move(all), std::move(following)};
}

EncodedFrame encode_frame(const MessageResponseTemplate& response, std::string_view id,
                          std::string_view parameters, nb::handle shapes, nb::handle values,
                          bool stream, nb::handle following) {
  const SentBuffers buffers(values);
  const SentBuffers fields(following);
  const ResponseOutputs outputs(shapes, buffers, response.forms());
  ResponseFrame frame = response.encode(id, parameters, outputs.all(), stream, fields.total());
  if (frame.nbytes >= kMessageLimit) return {{}, frame.nbytes};
  MessagePieces pieces(std::move(frame.opening),
                       frame.nbytes <= kCopiedFrame ? kCopiedFrame : kCopiedBuffer);
  for (std::size_t index = 0; index < buffers.count(); ++index) {
    pieces.append(frame.tags[index], buffers, index);
  }
  for (std::size_t index = 0; index < fields.count(); ++index) pieces.append({}, fields, index);
  return {pieces.finish(), frame.nbytes};
}

void bind_responses(nb::module_& module) {
  nb::class_<JsonResponseTemplate>(module, "JsonResponseTemplate")
      .def(nb::new_(&json_template))
      .def("encode", &encode_header);
  nb::class_<MessageResponseTemplate>(module, "MessageResponseTemplate")
      .def(nb::new_([](const nb::bytes& names, const std::vector<nb::bytes>& openings,
                       const nb::bytes& forms) {
        return MessageResponseTemplate(template_of(names, openings, forms));
      }))
      .def(
          "encode",
          [](const MessageResponseTemplate& self, std::string_view id, const nb::bytes& parameters,
             nb::handle shapes, nb::handle buffers, bool stream, nb::handle fields) -> nb::object {
            const EncodedFrame frame =
                encode_frame(self, id, view_of(parameters), shapes, buffers, stream, fields);
            if (frame.pieces.empty()) return nb::int_(frame.nbytes);
            nb::list segments;
            for (const nb::object& piece : frame.pieces) segments.append(piece);
            return segments;
          },
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg() = nb::tuple());
}

}  // namespace gpubridge
