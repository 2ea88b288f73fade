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

#include "buffer_view.h"
#include "request/request_bindings.h"
#include "request/response_templates.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::uint64_t kMessageLimit = std::uint64_t{1} << 31U;
constexpr std::uint64_t kJoinedFrame = 16384;
constexpr std::uint64_t kJoinedBuffer = 1024;

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
  Outputs(nb::handle shapes, nb::handle values, const std::vector<OutputForm>& forms)
      : outputs_(forms.size()) {
    if (nb::len(shapes) != forms.size() || nb::len(values) != forms.size()) {
      throw nb::value_error("expected one shape and one value for each output");
    }
    std::vector<std::size_t> ends;
    ends.reserve(forms.size());
    for (const nb::handle shape : shapes) {
      for (const nb::handle dim : shape) dims_.push_back(nb::cast<std::int64_t>(dim));
      ends.push_back(dims_.size());
    }
    std::size_t index = 0;
    for (const nb::handle value : values) {
      const std::size_t begin = index == 0 ? 0 : ends[index - 1];
      outputs_[index].dims = {dims_.data() + begin, ends[index] - begin};
      if (forms[index] == OutputForm::kJson) {
        outputs_[index].json = view_of(nb::cast<nb::bytes>(value));
        values_.push_back(nb::borrow(value));
      } else if (forms[index] == OutputForm::kBinary) {
        outputs_[index].nbytes = nb::len(value);
        nbytes_ += outputs_[index].nbytes;
      }
      ++index;
    }
  }

  [[nodiscard]] const std::vector<ResponseOutput>& all() const { return outputs_; }
  [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }

 private:
  std::vector<std::int64_t> dims_;
  std::vector<ResponseOutput> outputs_;
  std::vector<nb::object> values_;
  std::uint64_t nbytes_ = 0;
};

// Joins pieces of a frame: short buffers are copied into what surrounds them, long ones stay.
class Segments {
 public:
  Segments(std::string opening, bool join_all)
      : pending_(std::move(opening)), join_all_(join_all) {}

  void add(const std::string& tag, nb::handle buffer, std::uint64_t nbytes) {
    pending_.append(tag);
    if (nbytes == 0) return;
    if (join_all_ || nbytes <= kJoinedBuffer) {
      const BufferView view(buffer, PyBUF_SIMPLE);
      if (view.size() != nbytes) throw nb::value_error("the length of a buffer is not its bytes");
      pending_.append(static_cast<const char*>(view.data()), view.size());
      return;
    }
    flush();
    segments_.append(buffer);
  }

  nb::list finish() {
    flush();
    return std::move(segments_);
  }

 private:
  void flush() {
    if (!pending_.empty()) segments_.append(bytes_of(pending_));
    pending_.clear();
  }

  std::string pending_;
  nb::list segments_;
  bool join_all_;
};

nb::object encode_frame(const MessageResponseTemplate& response, std::string_view id,
                        const nb::bytes& parameters, nb::handle shapes, nb::handle buffers,
                        bool stream) {
  const Outputs outputs(shapes, buffers, response.forms());
  const MessageResponseTemplate::Frame frame =
      response.encode(id, view_of(parameters), outputs.all(), stream);
  if (frame.nbytes >= kMessageLimit) return nb::int_(frame.nbytes);
  Segments segments(frame.opening, frame.nbytes <= kJoinedFrame);
  std::size_t index = 0;
  for (const nb::handle buffer : buffers) {
    segments.add(frame.tags[index], buffer, outputs.all()[index].nbytes);
    ++index;
  }
  return segments.finish();
}

}  // namespace

void bind_responses(nb::module_& module) {
  nb::class_<JsonResponseTemplate>(module, "JsonResponseTemplate")
      .def(nb::new_([](const nb::bytes& names, const std::vector<nb::bytes>& openings,
                       const nb::bytes& forms) {
        return JsonResponseTemplate(std::string(view_of(names)), texts_of(openings),
                                    forms_of(forms, openings.size()));
      }))
      .def("encode", [](const JsonResponseTemplate& self, std::string_view id,
                        const nb::bytes& parameters, nb::handle shapes, nb::handle values) {
        const Outputs outputs(shapes, values, self.forms());
        return nb::make_tuple(bytes_of(self.encode(id, view_of(parameters), outputs.all())),
                              outputs.nbytes());
      });
  nb::class_<MessageResponseTemplate>(module, "MessageResponseTemplate")
      .def(nb::new_([](const nb::bytes& names, const std::vector<nb::bytes>& openings,
                       const nb::bytes& forms) {
        return MessageResponseTemplate(std::string(view_of(names)), texts_of(openings),
                                       forms_of(forms, openings.size()));
      }))
      .def("encode", &encode_frame);
}

}  // namespace gpubridge
