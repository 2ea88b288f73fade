// A long form of a ModelInferRequest (all but its id and raw contents), of which what may be long
// is taken out, without Python and so without its lock.
#pragma once

#include "std.h"

namespace gpubridge {

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
std::optional<SplitForm> split_form(std::string_view form);

}  // namespace gpubridge
