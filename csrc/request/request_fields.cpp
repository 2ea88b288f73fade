// The top level of a ModelInferRequest, for gpubridge.protocol.grpc.fields.

#include "buffer_view.h"
#include "dataplane.h"
#include "python_object.h"
#include "request/wire.h"

namespace gpubridge {
namespace {

constexpr std::uint8_t kId = wire_tag(3, kWireBytes);
constexpr std::uint8_t kInput = wire_tag(5, kWireBytes);
constexpr std::uint8_t kRaw = wire_tag(7, kWireBytes);
constexpr std::uint64_t kLongestField = 0x3FFF;

// A field that is part of the form: model name and version, parameters, inputs, outputs.
bool of_form(std::uint8_t tag) {
  return tag == 0x0A || tag == 0x12 || tag == 0x22 || tag == kInput || tag == 0x32;
}

// What comes before the raw contents.
struct Opening {
  std::string form;
  std::string_view identifier;
  std::size_t inputs = 0;
};

// Passes the fields before the raw contents; false for any that is unusual or not all there.
bool pass_opening(std::string_view message, WireReader& fields, Opening& opening) {
  bool identified = false;
  while (!fields.done() && fields.peek() != kRaw) {
    const std::size_t begin = fields.at();
    const std::uint8_t tag = fields.tag();
    std::string_view content;
    if (!fields.bytes(content) || content.size() > kLongestField) return false;
    if (tag == kId && !identified) {
      identified = true;
      opening.identifier = content;
      continue;
    }
    if (!of_form(tag)) return false;
    opening.inputs += tag == kInput ? 1 : 0;
    opening.form.append(message.substr(begin, fields.at() - begin));
  }
  return true;
}

// Returns form, id, number of inputs, size of the first raw content and where that begins, of the
// beginning of a message of `nbytes` that reaches so far, in the usual order; else None.
nb::object read_opening(nb::handle data, std::uint64_t nbytes) {
  const BufferView view(data, PyBUF_SIMPLE);
  const std::string_view message(static_cast<const char*>(view.data()), view.size());
  WireReader fields(message);
  Opening opening;
  if (!pass_opening(message, fields, opening) || fields.done()) return nb::none();
  std::uint64_t length = 0;
  fields.tag();
  if (!fields.length(length) || fields.at() > nbytes || length > nbytes - fields.at()) {
    return nb::none();
  }
  return nb::make_tuple(bytes_object(opening.form), bytes_object(opening.identifier),
                        opening.inputs, length, fields.at());
}

}  // namespace

void bind_request_fields(nb::module_& module) { module.def("read_opening", &read_opening); }

}  // namespace gpubridge
