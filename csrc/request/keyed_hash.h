// SipHash-1-3 with a random key of this process: clients cannot choose texts that collide.
#pragma once

#include "std.h"

namespace gpubridge {

std::uint64_t keyed_hash(std::string_view text);

struct KeyedHash {
  std::size_t operator()(std::string_view text) const {
    return static_cast<std::size_t>(keyed_hash(text));
  }
};

}  // namespace gpubridge
