// UTF-8: where its sequences end, and whether bytes are it.
#pragma once

#include "std.h"

namespace gpubridge {

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
