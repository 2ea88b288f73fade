// Texts: put together of parts, and as keys of maps.
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

}  // namespace gpubridge
