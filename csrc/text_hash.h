// A hash of text for maps that are asked by views, without making a string.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

namespace gpubridge {

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>{}(text);
  }
};

}  // namespace gpubridge
