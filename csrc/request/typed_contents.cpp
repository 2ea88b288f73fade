#include "request/typed_contents.h"

#include "request/wire.h"

namespace gpubridge {
namespace {

bool append_varints(std::string_view packed, std::size_t size, std::string& out) {
  static_assert(std::endian::native == std::endian::little);
  WireReader wire(packed);
  while (!wire.done()) {
    std::uint64_t value = 0;
    if (!wire.varint(value)) return false;
    out.append(reinterpret_cast<const char*>(&value), size);
  }
  return true;
}

bool append_string(std::string_view text, std::string& out) {
  if (text.size() > std::numeric_limits<std::uint32_t>::max()) return false;
  const auto length = static_cast<std::uint32_t>(text.size());
  out.append(reinterpret_cast<const char*>(&length), sizeof(length)).append(text);
  return true;
}

}  // namespace

bool pack_typed_contents(std::string_view message, unsigned field, WireForm form, std::size_t size,
                         std::string& out) {
  WireReader wire(message);
  while (!wire.done()) {
    std::uint64_t tag = 0;
    std::string_view value;
    if (!wire.varint(tag) || !wire.value(static_cast<unsigned>(tag & 7U), value)) return false;
    if (tag >> 3U != field) continue;
    bool good = true;
    if (form == WireForm::kBytes) {
      good = (tag & 7U) == kWireBytes && append_string(value, out);
    } else if (form == WireForm::kVarint) {
      good = append_varints(value, size, out);
    } else {
      good = value.size() % size == 0;
      if (good) out.append(value);
    }
    if (!good) return false;
  }
  return true;
}

}  // namespace gpubridge
