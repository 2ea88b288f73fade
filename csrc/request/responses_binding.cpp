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

// Members by their encoded names: a text, None for the id, or the index and datatype of an output.
GeneratedTemplate generated_template(
    const std::vector<std::tuple<nb::bytes, nb::object>>& members) {
  std::vector<GeneratedMember> made;
  for (const auto& [name, source] : members) {
    GeneratedMember& member = made.emplace_back(GeneratedMember{std::string(view_of(name)) + ':'});
    if (source.is_none()) {
      member.source = GeneratedMember::kId;
    } else if (PyBytes_Check(source.ptr())) {
      member.text = view_of(nb::borrow<nb::bytes>(source));
    } else {
      const auto [index, datatype] = nb::cast<std::tuple<unsigned, std::string>>(source);
      member.source = static_cast<int>(index);
      member.type = json_type(datatype);
    }
  }
  return GeneratedTemplate(std::move(made));
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

bool append_generated(const GeneratedTemplate& response, std::string_view id, nb::handle shapes,
                      nb::handle buffers, std::string& json) {
  const SentBuffers given(buffers);
  if (given.total() > kLongestJson || nb::len(shapes) != given.count()) return false;
  std::vector<std::string> outputs(given.count());
  std::string bytes;
  for (const GeneratedMember& member : response.members()) {
    if (member.source < 0) continue;
    const auto index = static_cast<std::size_t>(member.source);
    if (index >= outputs.size()) throw nb::value_error("expected a buffer for each output");
    const auto count = element_count(shapes[index]);
    if (!member.type || !count) return false;
    // A copy: the model may write to it meanwhile.
    bytes.clear();
    given.append_to(bytes, index);
    if (!format_values(bytes, *member.type, *count, outputs[index])) return false;
    if (*count == 1) outputs[index] = outputs[index].substr(1, outputs[index].size() - 2);
  }
  response.append(id, outputs, json);
  return true;
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
  nb::class_<GeneratedTemplate>(module, "GeneratedTemplate")
      .def(nb::new_(&generated_template))
      .def("encode",
           [](const GeneratedTemplate& self, std::string_view id, nb::handle shapes,
              nb::handle buffers) -> nb::object {
             std::string json;
             if (!append_generated(self, id, shapes, buffers, json)) return nb::none();
             return bytes_object(json);
           });
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
