#include "request_fields.h"

#include <cstddef>
#include <cstdint>

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::uint8_t kId = 3U << 3U | 2U;
constexpr std::uint8_t kRaw = 7U << 3U | 2U;
constexpr std::uint64_t kLongestField = 0x3FFF;
constexpr unsigned kLastShift = 63;

// A field that is part of the form: model name and version, parameters, inputs, outputs.
bool of_form(std::uint8_t tag) {
  return tag == 0x0A || tag == 0x12 || tag == 0x22 || tag == 0x2A || tag == 0x32;
}

class Message {
 public:
  explicit Message(const nb::bytes& message)
      : bytes_(reinterpret_cast<const std::uint8_t*>(message.c_str())), end_(message.size()) {}

  [[nodiscard]] std::size_t at() const { return at_; }
  [[nodiscard]] bool done() const { return at_ == end_; }
  [[nodiscard]] std::uint8_t tag() const { return bytes_[at_]; }
  [[nodiscard]] nb::bytes slice(std::size_t from, std::size_t to) const {
    return nb::bytes(text(from), to - from);
  }
  [[nodiscard]] const char* text(std::size_t from) const {
    return reinterpret_cast<const char*>(bytes_ + from);
  }

  // Goes to the data of the field that begins here; false if its length is none.
  bool enter(std::uint64_t& length) {
    ++at_;
    length = 0;
    for (unsigned shift = 0; at_ < end_ && shift <= kLastShift; shift += 7) {
      const std::uint8_t byte = bytes_[at_++];
      length |= std::uint64_t{byte & 127U} << shift;
      if (byte < 128) return length <= end_ - at_;
    }
    return false;
  }
  void pass(std::uint64_t length) { at_ += static_cast<std::size_t>(length); }

 private:
  const std::uint8_t* bytes_;
  std::size_t end_;
  std::size_t at_ = 0;
};

}  // namespace

nb::object read_request(const nb::bytes& message) {
  Message fields(message);
  std::uint64_t length = 0;
  std::size_t id_at = 0;
  std::size_t id_end = 0;
  nb::object identifier = nb::str("");
  while (!fields.done() && fields.tag() != kRaw) {
    const std::uint8_t tag = fields.tag();
    const std::size_t begin = fields.at();
    if (!fields.enter(length) || length > kLongestField) return nb::none();
    if (tag == kId && id_end == 0) {
      PyObject* text = PyUnicode_DecodeUTF8(fields.text(fields.at()),
                                            static_cast<Py_ssize_t>(length), nullptr);
      if (text == nullptr) {
        PyErr_Clear();
        return nb::none();
      }
      identifier = nb::steal(text);
      id_at = begin;
      id_end = fields.at() + static_cast<std::size_t>(length);
    } else if (!of_form(tag)) {
      return nb::none();
    }
    fields.pass(length);
  }
  const std::size_t form_end = fields.at();
  nb::list sizes;
  nb::list offsets;
  while (!fields.done()) {
    if (fields.tag() != kRaw || !fields.enter(length)) return nb::none();
    sizes.append(length);
    offsets.append(fields.at());
    fields.pass(length);
  }
  nb::bytes form = fields.slice(0, id_end == 0 ? form_end : id_at);
  if (id_end != 0) {
    form = nb::steal<nb::bytes>(
        PySequence_Concat(form.ptr(), fields.slice(id_end, form_end).ptr()));
  }
  return nb::make_tuple(form, identifier, nb::tuple(sizes), offsets);
}

}  // namespace gpubridge
