// The wire format of protobuf, read from the start of a message on: fields one after another, each
// a tag (its number and wire type) and a value.
#pragma once

#include "std.h"

namespace gpubridge {

inline constexpr unsigned kWireVarint = 0;
inline constexpr unsigned kWire64 = 1;
inline constexpr unsigned kWireBytes = 2;
inline constexpr unsigned kWireGroup = 3;
inline constexpr unsigned kWireEndGroup = 4;
inline constexpr unsigned kWire32 = 5;

constexpr std::uint8_t wire_tag(unsigned number, unsigned type) {
  return static_cast<std::uint8_t>(number << 3U | type);
}

// Every reading function says whether what it is for is there.
class WireReader {
 public:
  explicit WireReader(std::string_view message) : message_(message) {}

  [[nodiscard]] bool done() const { return at_ == message_.size(); }
  [[nodiscard]] std::size_t at() const { return at_; }
  [[nodiscard]] std::size_t left() const { return message_.size() - at_; }
  [[nodiscard]] std::uint8_t peek() const { return static_cast<std::uint8_t>(message_[at_]); }

  // Takes a tag of one byte; 0, which is no tag, for any other. Not at the end.
  [[nodiscard]] std::uint8_t tag() {
    const std::uint8_t byte = peek();
    ++at_;
    return byte < 0x80 ? byte : 0;
  }

  // Bits above the 64th are dropped, as everywhere.
  [[nodiscard]] bool varint(std::uint64_t& value) { return number(value, 63); }

  // Takes the length of a value; it may be longer than what there is.
  [[nodiscard]] bool length(std::uint64_t& value) { return number(value, 28); }

  [[nodiscard]] bool take(std::uint64_t size, std::string_view& content) {
    if (size > left()) return false;
    content = message_.substr(at_, static_cast<std::size_t>(size));
    at_ += content.size();
    return true;
  }

  [[nodiscard]] bool bytes(std::string_view& content) {
    std::uint64_t size = 0;
    return length(size) && take(size, content);
  }

  // Takes a value of any wire type; of a number, the bytes that it has on the wire.
  [[nodiscard]] bool value(unsigned type, std::string_view& content) {
    if (type == kWire64) return take(sizeof(std::uint64_t), content);
    if (type == kWire32) return take(sizeof(std::uint32_t), content);
    if (type == kWireBytes) return bytes(content);
    const std::size_t begin = at_;
    std::uint64_t number = 0;
    if (type != kWireVarint || !varint(number)) return false;
    content = message_.substr(begin, at_ - begin);
    return true;
  }

  // Passes over a group whose begin was taken, up to its end.
  [[nodiscard]] bool group() {
    std::uint64_t tag = 0;
    std::string_view content;
    for (std::uint64_t depth = 1; depth != 0;) {
      if (!varint(tag)) return false;
      const auto type = static_cast<unsigned>(tag & 7U);
      if (type == kWireGroup) {
        ++depth;
      } else if (type == kWireEndGroup) {
        --depth;
      } else if (!value(type, content)) {
        return false;
      }
    }
    return true;
  }

 private:
  [[nodiscard]] bool number(std::uint64_t& value, unsigned last_shift) {
    value = 0;
    for (unsigned shift = 0; !done() && shift <= last_shift; shift += 7) {
      const std::uint8_t byte = peek();
      ++at_;
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  std::string_view message_;
  std::size_t at_ = 0;
};

inline void append_varint(std::string& bytes, std::uint64_t number) {
  for (; number > 0x7F; number >>= 7U) bytes.push_back(static_cast<char>(number | 0x80U));
  bytes.push_back(static_cast<char>(number));
}

// Appends a field whose content has a length.
inline void append_field(std::string& bytes, std::uint8_t tag, std::string_view content) {
  bytes.push_back(static_cast<char>(tag));
  append_varint(bytes, content.size());
  bytes.append(content);
}

}  // namespace gpubridge
