// The Huffman code of HPACK (RFC 7541, appendix B): clients send their strings in it.
#pragma once

#include "std.h"

namespace gpubridge {

// Appends the text that `coded` stands for; false where it is no sequence of codes with a padding
// of fewer than eight bits, all ones.
bool huffman_decode(std::span<const std::uint8_t> coded, std::string& text);

}  // namespace gpubridge
