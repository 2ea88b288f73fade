// Copies of tensors.
#pragma once

#include "std.h"

namespace gpubridge {

// Copies bytes; the interpreter's other threads run meanwhile where they are many.
void copy_bytes(char* to, const void* from, std::size_t size);

}  // namespace gpubridge
