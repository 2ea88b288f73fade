// Search for bytes of a text, eight at a time.
#pragma once

#include "std.h"

namespace gpubridge {

// Eight bytes of a text at once.
struct ByteWord {
  std::uint64_t bytes = 0;

  static constexpr std::uint64_t kOnes = 0x0101010101010101;
  static constexpr std::uint64_t kHighs = 0x8080808080808080;

  // The high bit of each byte is set where that holds, up to and with the first where it does.
  [[nodiscard]] std::uint64_t is(char wanted) const {
    return ByteWord{bytes ^ kOnes * static_cast<unsigned char>(wanted)}.below(1);
  }
  [[nodiscard]] std::uint64_t below(unsigned char limit) const {
    return (bytes - kOnes * limit) & ~bytes & kHighs;
  }
  [[nodiscard]] std::uint64_t no_ascii() const { return bytes & kHighs; }
  [[nodiscard]] ByteWord with(unsigned char bits) const { return {bytes | kOnes * bits}; }
};

// The first byte from `at` on that `find` marks in its word; the end of the text where none is.
template <typename Find>
std::size_t find_byte(std::string_view text, std::size_t at, Find find) {
  static_assert(std::endian::native == std::endian::little);
  while (at < text.size()) {
    const std::size_t size = std::min(text.size() - at, sizeof(std::uint64_t));
    ByteWord word;
    if (size == sizeof word) {
      std::memcpy(&word, text.data() + at, sizeof word);
    } else {
      std::memcpy(&word, text.data() + at, size);
    }
    if (const std::uint64_t found = find(word)) {
      return std::min(at + static_cast<std::size_t>(std::countr_zero(found)) / 8, text.size());
    }
    at += size;
  }
  return text.size();
}

}  // namespace gpubridge
