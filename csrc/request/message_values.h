// Long fields of a ModelInferRequest, without Python and so without its lock.
#pragma once

#include "std.h"

namespace gpubridge {

// A long form (all of a request but its id and raw contents), of which what may be long is taken
// out.
struct SplitForm {
  // A message without the request's own parameters, as far as these are valid, and without those of
  // inputs and outputs that mean nothing. Long typed contents have one element in each field that
  // has any.
  std::string skeleton;
  // The parameters, as a JSON object in the order of their names; empty for none.
  std::string parameters;
  // The typed contents of each input: a view of the form, empty where the skeleton has them.
  std::vector<std::string_view> contents;
};

// Nothing for a message that is malformed, or in any way unusual.
[[nodiscard]] std::optional<SplitForm> split_form(std::string_view form);

// Wire format of the values of a field.
enum class WireForm { kVarint, kFixed, kBytes };

// Appends the values of one repeated field of a message, packed or not, as elements of `size` bytes
// behind one another; integers keep their low bytes, those of `kFixed` have their size on the wire,
// and `kBytes` become the strings of a BYTES tensor. Other fields, and those of another wire type,
// are passed over. False where the message is malformed.
[[nodiscard]] bool pack_typed_contents(std::string_view message, unsigned field, WireForm form,
                                       std::size_t size, std::string& out);

}  // namespace gpubridge
