#include "request/request_fields.h"

#include <cstddef>
#include <cstdint>

#include "buffer_view.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::uint8_t kId = 3U << 3U | 2U;
constexpr std::uint8_t kInput = 5U << 3U | 2U;
constexpr std::uint8_t kRaw = 7U << 3U | 2U;
constexpr std::uint64_t kLongestField = 0x3FFF;
constexpr unsigned kLastShift = 63;

// A field that is part of the form: model name and version, parameters, inputs, outputs.
bool of_form(std::uint8_t tag) {
  return tag == 0x0A || tag == 0x12 || tag == 0x22 || tag == kInput || tag == 0x32;
}

class Message {
 public:
  Message(const void* bytes, std::size_t size)
      : bytes_(static_cast<const std::uint8_t*>(bytes)), end_(size) {}

  [[nodiscard]] std::size_t at() const { return at_; }
  [[nodiscard]] std::size_t left() const { return end_ - at_; }
  [[nodiscard]] std::uint8_t tag() const { return bytes_[at_]; }
  [[nodiscard]] nb::bytes slice(std::size_t from, std::size_t to) const {
    return nb::bytes(reinterpret_cast<const char*>(bytes_ + from), to - from);
  }

  // Goes to the data of the field that begins here; false if its length is none, or not all there.
  bool enter(std::uint64_t& length) {
    ++at_;
    length = 0;
    for (unsigned shift = 0; at_ < end_ && shift <= kLastShift; shift += 7) {
      const std::uint8_t byte = bytes_[at_++];
      length |= std::uint64_t{byte & 127U} << shift;
      if (byte < 128) return true;
    }
    return false;
  }
  void pass(std::uint64_t length) { at_ += static_cast<std::size_t>(length); }

 private:
  const std::uint8_t* bytes_;
  std::size_t end_;
  std::size_t at_ = 0;
};

// What comes before the raw contents.
struct Opening {
  nb::bytes form = nb::bytes("", 0);
  nb::bytes identifier = nb::bytes("", 0);
  std::size_t inputs = 0;
};

// Passes the fields before the raw contents; false for any that is unusual or not all there.
bool pass_opening(Message& fields, Opening& opening) {
  std::uint64_t length = 0;
  std::size_t id_at = 0;
  std::size_t id_end = 0;
  while (fields.left() != 0 && fields.tag() != kRaw) {
    const std::uint8_t tag = fields.tag();
    const std::size_t begin = fields.at();
    if (!fields.enter(length) || length > kLongestField || length > fields.left()) return false;
    if (tag == kId && id_end == 0) {
      id_at = begin;
      id_end = fields.at() + static_cast<std::size_t>(length);
      opening.identifier = fields.slice(fields.at(), id_end);
    } else if (!of_form(tag)) {
      return false;
    }
    opening.inputs += tag == kInput ? 1 : 0;
    fields.pass(length);
  }
  const std::size_t end = fields.at();
  opening.form = fields.slice(0, id_end == 0 ? end : id_at);
  if (id_end != 0) {
    opening.form = nb::steal<nb::bytes>(
        PySequence_Concat(opening.form.ptr(), fields.slice(id_end, end).ptr()));
  }
  return true;
}

}  // namespace

nb::object read_opening(nb::handle data, std::uint64_t nbytes) {
  const BufferView view(data, PyBUF_SIMPLE);
  Message fields(view.data(), view.size());
  Opening opening;
  if (!pass_opening(fields, opening) || fields.left() == 0) return nb::none();
  std::uint64_t length = 0;
  if (!fields.enter(length) || fields.at() > nbytes || length > nbytes - fields.at()) {
    return nb::none();
  }
  return nb::make_tuple(opening.form, opening.identifier, opening.inputs, length, fields.at());
}

}  // namespace gpubridge
