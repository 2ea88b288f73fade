// What a scanner reads from a request: its key and the values that vary between requests.
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
};

// A role whose values are texts; those of all others are numbers.
constexpr bool is_text(Role role) {
  return role == Role::kSequenceText || role == Role::kCustomText || role == Role::kInputRegion ||
         role == Role::kOutputRegion || role == Role::kId;
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

// A scanned request. Requests with equal keys differ in their values only: they have the same
// number of values, with the same roles, owners and names, in the same order. Dims, sizes and the
// id are kept apart from the other values: every request has them.
struct RequestScan {
  std::string key;
  std::string_view id;
  std::vector<std::uint64_t> dims;
  std::vector<std::uint32_t> ranks;
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint32_t> size_owners;
  std::vector<ScannedValue> others;
  std::uint32_t inputs = 0;
  std::uint32_t outputs = 0;

  void clear() {
    key.clear();
    id = {};
    dims.clear();
    ranks.clear();
    sizes.clear();
    size_owners.clear();
    others.clear();
    inputs = outputs = 0;
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
      default:
        others.push_back(value);
    }
  }
};

// A request of more bytes, its data not counted, never becomes a template; 500 tensors take 45 to
// 100 KB.
constexpr std::size_t kLongestScanned = std::size_t{256} << 10U;

}  // namespace gpubridge
