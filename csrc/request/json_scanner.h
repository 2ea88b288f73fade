// Scans the JSON header of a v2 inference request in one pass.
//
// The key is the text with each value that may vary replaced by the marker of its role. Such values
// are non-negative integers below 2^64 and strings without escapes, at the paths that have a role;
// everything else is part of the key as it stands: floats, signs, booleans, names, datatypes, white
// space.
#pragma once

#include "request/scan.h"
#include "std.h"

namespace gpubridge {

// False for a text that cannot become a template: one that is no JSON object, is too long or too
// deep, has an input with `data`, a member twice, very many members in one object, an escape in a
// name or in the id, a control character, or a varying text that is not UTF-8.
bool scan_json(std::string_view text, RequestScan& scan);

}  // namespace gpubridge
