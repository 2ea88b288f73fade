// Numbers as they lie in messages: little-endian, at any address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace gpubridge {

template <typename Number>
Number get_number(const char* at) {
  using Bits = std::make_unsigned_t<Number>;
  Bits bits = 0;
  for (std::size_t byte = 0; byte < sizeof(Bits); ++byte) {
    bits |=
        static_cast<Bits>(static_cast<Bits>(static_cast<unsigned char>(at[byte])) << (8U * byte));
  }
  return static_cast<Number>(bits);
}

template <typename Number>
char* put_number(char* at, Number number) {
  const auto bits = static_cast<std::make_unsigned_t<Number>>(number);
  for (std::size_t byte = 0; byte < sizeof(bits); ++byte) {
    *at++ = static_cast<char>((bits >> (8U * byte)) & 0xFFU);
  }
  return at;
}

inline char* put_bytes(char* at, std::string_view bytes) {
  if (!bytes.empty()) std::memcpy(at, bytes.data(), bytes.size());
  return at + bytes.size();
}

}  // namespace gpubridge
