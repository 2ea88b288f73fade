// Texts: put together of parts, as keys of maps, and as UTF-8.
#pragma once

#include <type_traits>

#include "std.h"

namespace gpubridge {

// One text of texts and numbers.
template <typename... Parts>
std::string joined(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

template <typename Number>
void append_integer(std::string& text, Number number, int base = 10) {
  std::array<char, 24> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number, base).ptr;
  text.append(digits.data(), end);
}

// Takes as long wherever two texts of a length differ: one of them is a secret.
inline bool equal_secret(std::string_view left, std::string_view right) {
  if (left.size() != right.size()) return false;
  unsigned char differences = 0;
  for (std::size_t index = 0; index < left.size(); ++index) {
    differences |= static_cast<unsigned char>(left[index] ^ right[index]);
  }
  return differences == 0;
}

// A hash for maps that are asked by views, without making a string.
struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>{}(text);
  }
};

// Bytes of the sequence at `at`; 0 where there is none, or an overlong one or a surrogate.
inline std::size_t utf8_length(std::string_view raw, std::size_t at) {
  const auto byte = [&](std::size_t index) {
    return at + index < raw.size() ? static_cast<unsigned char>(raw[at + index]) : 0U;
  };
  const auto follows = [&](std::size_t index) { return (byte(index) & 0xC0U) == 0x80U; };
  const unsigned first = byte(0);
  if (first < 0x80U) return at < raw.size() ? 1 : 0;
  if (first >= 0xC2U && first <= 0xDFU) return follows(1) ? 2 : 0;
  if (first >= 0xE0U && first <= 0xEFU) {
    const unsigned second = byte(1);
    const bool plain = !(first == 0xE0U && second < 0xA0U) && !(first == 0xEDU && second > 0x9FU);
    return plain && follows(1) && follows(2) ? 3 : 0;
  }
  if (first >= 0xF0U && first <= 0xF4U) {
    const unsigned second = byte(1);
    const bool plain = !(first == 0xF0U && second < 0x90U) && !(first == 0xF4U && second > 0x8FU);
    return plain && follows(1) && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

inline bool is_utf8(std::string_view raw) {
  for (std::size_t at = 0; at < raw.size();) {
    const std::size_t length = utf8_length(raw, at);
    if (length == 0) return false;
    at += length;
  }
  return true;
}

}  // namespace gpubridge
