// Scans the fields of a ModelInferRequest in one pass.
//
// The key has all fields but the id and the raw contents, in wire order and without the lengths of
// messages; each value that may vary is replaced by the marker of its role. Such values are dims,
// integers that are not negative, and strings, at the paths that have a role.
#pragma once

#include "request/scan.h"
#include "std.h"

namespace gpubridge {

// Scans a whole message; `offsets` gets where each raw content begins in it. False for one that
// cannot become a template: one with unknown fields, singular fields twice, typed contents,
// negative dims, a parameter twice, or raw contents that are not one for each input that is not in
// a region.
bool scan_message(std::string_view message, RequestScan& scan, std::vector<std::uint64_t>& offsets);

// Scans the fields of a message that came without its id and raw contents, which have `sizes`.
bool scan_fields(std::string_view fields, const std::vector<std::uint64_t>& sizes,
                 RequestScan& scan);

}  // namespace gpubridge
