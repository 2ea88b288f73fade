// Numbers as they lie in messages: little-endian, at any address.
#pragma once

#include "std.h"

namespace gpubridge {

static_assert(std::endian::native == std::endian::little, "numbers are copied as they lie");

template <typename Number>
Number get_number(const char* at) {
  Number number;
  std::memcpy(&number, at, sizeof number);
  return number;
}

template <typename Number>
char* put_number(char* at, Number number) {
  std::memcpy(at, &number, sizeof number);
  return at + sizeof number;
}

template <typename Number>
void append_number(std::string& out, Number number) {
  std::array<char, sizeof(Number)> bytes{};
  put_number(bytes.data(), number);
  out.append(bytes.data(), bytes.size());
}

inline char* put_bytes(char* at, std::string_view bytes) {
  if (!bytes.empty()) std::memcpy(at, bytes.data(), bytes.size());
  return at + bytes.size();
}

// Takes the next bytes of a message; throws an Error of that text where there are not as many.
template <typename Error>
std::string_view take_bytes(std::string_view message, std::size_t& at, std::size_t count,
                            const char* text) {
  if (at > message.size() || count > message.size() - at) throw Error(text);
  return message.substr(std::exchange(at, at + count), count);
}

// Takes the next string of a BYTES tensor, behind its length of four bytes; nothing where it is cut
// short. Another process may be writing the bytes: a length is read once, and checked.
[[nodiscard]] inline std::optional<std::string_view> take_string(std::string_view& bytes) {
  if (bytes.size() < sizeof(std::uint32_t)) return std::nullopt;
  const std::size_t length = get_number<std::uint32_t>(bytes.data());
  if (length > bytes.size() - sizeof(std::uint32_t)) return std::nullopt;
  const std::string_view text = bytes.substr(sizeof(std::uint32_t), length);
  bytes.remove_prefix(sizeof(std::uint32_t) + length);
  return text;
}

}  // namespace gpubridge
