// Result of scanning a request: its key and the values that vary between requests.
#pragma once

#include "std.h"

namespace gpubridge {

// The meaning of a value that may vary, by its path in the request. The number of a role is its
// marker in the key of JSON text, where no control character can stand; tab, line feed and carriage
// return are left out.
enum class Role : std::uint8_t {
  kNone = 0,
  kDim = 0x01,
  kBinarySize = 0x02,
  kPriority = 0x03,
  kTimeout = 0x04,
  kSequenceNumber = 0x05,
  kSequenceText = 0x06,
  kCustomNumber = 0x07,
  kCustomText = 0x08,
  kInputRegion = 0x0E,
  kInputOffset = 0x0F,
  kInputBytes = 0x10,
  kOutputRegion = 0x11,
  kOutputOffset = 0x12,
  kOutputBytes = 0x13,
  kId = 0x14,
  kValues = 0x15,
};

// A role whose values are texts; those of all others are numbers.
constexpr bool is_text(Role role) {
  return role == Role::kSequenceText || role == Role::kCustomText || role == Role::kInputRegion ||
         role == Role::kOutputRegion || role == Role::kId || role == Role::kValues;
}

// One value; its texts are views of the scanned bytes. `owner` is the index of its input or output,
// `name` that of a custom parameter.
struct ScannedValue {
  Role role = Role::kNone;
  std::uint32_t owner = 0;
  std::uint64_t number = 0;
  std::string_view text = {};
  std::string_view name = {};
};

// Where a value stands in a text: behind `literal` bytes of the key, which follow the value before
// it. The name of a custom parameter begins `name_before` bytes before its value.
struct ScannedPlace {
  Role role = Role::kNone;
  std::uint32_t owner = 0;
  std::size_t literal = 0;
  std::size_t name_before = 0;
  std::size_t name_size = 0;
};

// A scanned request. Requests with equal keys differ in their values only: they have the same
// number of values, with the same roles, owners and names, in the same order. Dims, sizes, arrays
// of JSON values and the id are kept apart from the other values: every request has some of them.
struct RequestScan {
  std::string key;
  std::string_view id;
  std::vector<std::uint64_t> dims;
  std::vector<std::uint32_t> ranks;
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint32_t> size_owners;
  std::vector<std::string_view> arrays;  // With their brackets; the values are still to be read.
  std::vector<std::uint32_t> array_owners;
  std::vector<std::uint64_t> counts;  // Values of each input, where its dims follow from them.
  std::vector<ScannedValue> others;
  std::vector<ScannedPlace> places;  // Of all values, in their order; none unless of a JSON header.
  std::uint32_t inputs = 0;
  std::uint32_t outputs = 0;

  void clear() {
    clear_values();
    key.clear();
    ranks.clear();
    places.clear();
    inputs = outputs = 0;
  }

  // Forgets what requests with this key may differ in.
  void clear_values() {
    id = {};
    dims.clear();
    std::ranges::fill(ranks, 0U);
    sizes.clear();
    size_owners.clear();
    arrays.clear();
    array_owners.clear();
    counts.clear();
    others.clear();
  }

  void add(const ScannedValue& value) {
    switch (value.role) {
      case Role::kId:
        id = value.text;
        break;
      case Role::kDim:
        dims.push_back(value.number);
        ++ranks[value.owner];
        break;
      case Role::kBinarySize:
        sizes.push_back(value.number);
        size_owners.push_back(value.owner);
        break;
      case Role::kValues:
        arrays.push_back(value.text);
        array_owners.push_back(value.owner);
        break;
      default:
        others.push_back(value);
    }
  }
};

// A request of more bytes, its data not counted, never becomes a template; 500 tensors take 45 to
// 100 KB.
constexpr std::size_t kLongestScanned = std::size_t{256} << 10U;

// Scans the JSON header of a v2 inference request in one pass. Where `scan` has the result of a
// header with the same key, as it mostly has, only what stands at the places of its values is read.
//
// The key is the text with each value that may vary replaced by the marker of its role. Such values
// are non-negative integers below 2^64 and strings without escapes, at the paths that have a role,
// and the array of an input's JSON values, of which only the end is looked for; everything else is
// part of the key as it stands: floats, signs, booleans, names, datatypes, white space.
//
// False for a text that cannot become a template: one that is no JSON object, is too long or too
// deep, has an input's `data` that is no array, a member twice, very many members in one object, an
// escape in a name or in the id, a control character, or a varying text that is not UTF-8.
[[nodiscard]] bool scan_json(std::string_view text, RequestScan& scan);

// Scans the flat JSON object of a generate request to a model with these inputs in one pass.
//
// Inputs (a value, or an array of values), numbers and strings vary, also those of the member
// `parameters`; an id is a parameter, too. All else is part of the key, and false is returned, as
// above. So it is for a name that comes twice, and for values in more than one array.
[[nodiscard]] bool scan_generated(std::string_view text, std::span<const std::string> inputs,
                                  RequestScan& scan);

// Scans the fields of a ModelInferRequest in one pass.
//
// The key has all fields but the id and the raw contents, in wire order and without the lengths of
// messages; each value that may vary is replaced by the marker of its role. Such values are dims,
// integers that are not negative, and strings, at the paths that have a role.
//
// Scans a whole message; `offsets` gets where each raw content begins in it. False for one that
// cannot become a template: one with unknown fields, singular fields twice, typed contents,
// negative dims, a parameter twice, or raw contents that are not one for each input that is not in
// a region.
[[nodiscard]] bool scan_message(std::string_view message, RequestScan& scan,
                                std::vector<std::uint64_t>& offsets);

// Scans the fields of a message that came without its id and raw contents, which have `sizes`.
[[nodiscard]] bool scan_fields(std::string_view fields, const std::vector<std::uint64_t>& sizes,
                               RequestScan& scan);

}  // namespace gpubridge
