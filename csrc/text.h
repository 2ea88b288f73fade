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

// A hash for maps that are asked by views, without making a string.
struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>{}(text);
  }
};

}  // namespace gpubridge
