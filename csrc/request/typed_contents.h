// Tensor values in the typed fields of a gRPC request (InferTensorContents) to the bytes of a
// tensor, without Python and so without its lock.
#pragma once

#include "std.h"

namespace gpubridge {

// Wire format of the values of a field.
enum class WireForm { kVarint, kFixed, kBytes };

// Appends the values of one repeated field of a message, packed or not, as elements of `size` bytes
// behind one another; integers keep their low bytes, those of `kFixed` have their size on the wire,
// and `kBytes` become the strings of a BYTES tensor. Other fields are passed over. False where the
// message is malformed.
bool pack_typed_contents(std::string_view message, unsigned field, WireForm form, std::size_t size,
                         std::string& out);

}  // namespace gpubridge
