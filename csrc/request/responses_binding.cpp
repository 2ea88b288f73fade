#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memory/sent_buffers.h"
#include "request/request_bindings.h"
#include "request/response_templates.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::uint64_t kMessageLimit = std::uint64_t{1} << 31U;
constexpr std::uint64_t kCopiedFrame = 16384;
constexpr std::uint64_t kCopiedBuffer = 1024;

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

std::vector<std::string> texts_of(const std::vector<nb::bytes>& given) {
  std::vector<std::string> texts;
  texts.reserve(given.size());
  for (const nb::bytes& text : given) texts.emplace_back(view_of(text));
  return texts;
}

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

// What one response puts into a template; holds the dims that its outputs refer to.
class Outputs {
 public:
  Outputs(nb::handle shapes, const std::vector<OutputForm>& forms) : outputs_(forms.size()) {
    if (nb::len(shapes) != forms.size()) {
      throw nb::value_error("expected one shape for each output");
    }
    std::vector<std::size_t> ends;
    ends.reserve(forms.size());
    for (const nb::handle shape : shapes) {
      for (const nb::handle dim : shape) dims_.push_back(nb::cast<std::int64_t>(dim));
      ends.push_back(dims_.size());
    }
    std::size_t begin = 0;
    for (std::size_t index = 0; index < ends.size(); begin = ends[index++]) {
      outputs_[index].dims = {dims_.data() + begin, ends[index] - begin};
    }
  }

  ResponseOutput& operator[](std::size_t index) { return outputs_[index]; }
  [[nodiscard]] const std::vector<ResponseOutput>& all() const { return outputs_; }

 private:
  std::vector<std::int64_t> dims_;
  std::vector<ResponseOutput> outputs_;
};

void check_count(const SentBuffers& buffers, const std::vector<OutputForm>& forms) {
  if (buffers.count() != forms.size()) {
    throw nb::value_error("expected one value for each output");
  }
}

// Values are the buffers of outputs, and the JSON of those that are told so.
nb::object encode_header(const JsonResponseTemplate& response, std::string_view id,
                         const nb::bytes& parameters, nb::handle shapes, nb::handle values) {
  const SentBuffers buffers(values);
  check_count(buffers, response.forms());
  Outputs outputs(shapes, response.forms());
  std::vector<nb::object> texts;
  std::uint64_t nbytes = 0;
  for (std::size_t index = 0; index < buffers.count(); ++index) {
    if (response.forms()[index] == OutputForm::kJson) {
      texts.push_back(buffers.object(index));
      outputs[index].json = view_of(nb::cast<nb::bytes>(texts.back()));
    } else if (response.forms()[index] == OutputForm::kBinary) {
      outputs[index].nbytes = buffers.size(index);
      nbytes += buffers.size(index);
    }
  }
  return nb::make_tuple(bytes_of(response.encode(id, view_of(parameters), outputs.all())), nbytes);
}

nb::object encode_frame(const MessageResponseTemplate& response, std::string_view id,
                        const nb::bytes& parameters, nb::handle shapes, nb::handle values,
                        bool stream) {
  const SentBuffers buffers(values);
  check_count(buffers, response.forms());
  Outputs outputs(shapes, response.forms());
  for (std::size_t index = 0; index < buffers.count(); ++index) {
    outputs[index].nbytes = buffers.size(index);
  }
  MessageResponseTemplate::Frame frame =
      response.encode(id, view_of(parameters), outputs.all(), stream);
  if (frame.nbytes >= kMessageLimit) return nb::int_(frame.nbytes);
  MessagePieces pieces(std::move(frame.opening),
                       frame.nbytes <= kCopiedFrame ? kCopiedFrame : kCopiedBuffer);
  for (std::size_t index = 0; index < buffers.count(); ++index) {
    pieces.append(frame.tags[index], buffers, index);
  }
  nb::list segments;
  for (const nb::object& piece : pieces.finish()) segments.append(piece);
  return segments;
}

}  // namespace

void bind_responses(nb::module_& module) {
  nb::class_<JsonResponseTemplate>(module, "JsonResponseTemplate")
      .def(nb::new_([](const nb::bytes& names, const std::vector<nb::bytes>& openings,
                       const nb::bytes& forms) {
        return JsonResponseTemplate(std::string(view_of(names)), texts_of(openings),
                                    forms_of(forms, openings.size()));
      }))
      .def("encode", &encode_header);
  nb::class_<MessageResponseTemplate>(module, "MessageResponseTemplate")
      .def(nb::new_([](const nb::bytes& names, const std::vector<nb::bytes>& openings,
                       const nb::bytes& forms) {
        return MessageResponseTemplate(std::string(view_of(names)), texts_of(openings),
                                       forms_of(forms, openings.size()));
      }))
      .def("encode", &encode_frame);
}

}  // namespace gpubridge
