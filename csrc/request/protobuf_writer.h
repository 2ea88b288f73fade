// Fields of protobuf messages, written.
#pragma once

#include "std.h"

namespace gpubridge {

inline void append_varint(std::string& bytes, std::uint64_t number) {
  for (; number > 0x7F; number >>= 7U) bytes.push_back(static_cast<char>(number | 0x80U));
  bytes.push_back(static_cast<char>(number));
}

// Appends a field whose content has a length.
inline void append_field(std::string& bytes, char tag, std::string_view content) {
  bytes.push_back(tag);
  append_varint(bytes, content.size());
  bytes.append(content);
}

}  // namespace gpubridge
