#include "request/typed_contents.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

namespace gpubridge {
namespace {

constexpr unsigned kWireVarint = 0;
constexpr unsigned kWire64 = 1;
constexpr unsigned kWireLength = 2;
constexpr unsigned kWire32 = 5;
constexpr unsigned kLastShift = 63;

class Wire {
 public:
  explicit Wire(std::string_view bytes) : bytes_(bytes) {}

  [[nodiscard]] bool at_end() const { return bytes_.empty(); }

  bool varint(std::uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; shift <= kLastShift && !bytes_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(bytes_.front());
      bytes_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80U) return true;
    }
    return false;
  }

  bool take(std::uint64_t size, std::string_view& taken) {
    if (size > bytes_.size()) return false;
    taken = bytes_.substr(0, static_cast<std::size_t>(size));
    bytes_.remove_prefix(static_cast<std::size_t>(size));
    return true;
  }

  // Takes the value of a field of any wire type; of a number on the wire, its own bytes.
  bool value(unsigned type, std::string_view& taken) {
    std::uint64_t length = 0;
    if (type == kWire64) return take(sizeof(std::uint64_t), taken);
    if (type == kWire32) return take(sizeof(std::uint32_t), taken);
    if (type == kWireLength) return varint(length) && take(length, taken);
    const std::string_view before = bytes_;
    if (type != kWireVarint || !varint(length)) return false;
    taken = before.substr(0, before.size() - bytes_.size());
    return true;
  }

 private:
  std::string_view bytes_;
};

bool append_varints(std::string_view packed, std::size_t size, std::string& out) {
  static_assert(std::endian::native == std::endian::little);
  Wire wire(packed);
  while (!wire.at_end()) {
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
  Wire wire(message);
  while (!wire.at_end()) {
    std::uint64_t tag = 0;
    std::string_view value;
    if (!wire.varint(tag) || !wire.value(static_cast<unsigned>(tag & 7U), value)) return false;
    if (tag >> 3U != field) continue;
    bool good = true;
    if (form == WireForm::kBytes) {
      good = (tag & 7U) == kWireLength && append_string(value, out);
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
