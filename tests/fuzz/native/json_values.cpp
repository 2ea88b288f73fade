// Values of JSON arrays: what is packed is formatted and packed again to the same bytes, and a
// document is the sum of the parts that it is split into.
#include "request/json_values.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fuzz.h"

namespace {

using gpubridge::ElementKind;
using gpubridge::ElementType;
using gpubridge::fuzz::expect;

constexpr std::array<ElementType, 12> kTypes{{{ElementKind::kBool, 1},
                                              {ElementKind::kSigned, 1},
                                              {ElementKind::kSigned, 2},
                                              {ElementKind::kSigned, 4},
                                              {ElementKind::kSigned, 8},
                                              {ElementKind::kUnsigned, 1},
                                              {ElementKind::kUnsigned, 2},
                                              {ElementKind::kUnsigned, 4},
                                              {ElementKind::kUnsigned, 8},
                                              {ElementKind::kFloat, 4},
                                              {ElementKind::kFloat, 8},
                                              {ElementKind::kString, 0}}};

void check_split(std::string_view document) {
  const auto split = gpubridge::split_data(document);
  if (!split) return;
  std::size_t taken = 0;
  const char* last = document.data();
  for (const std::string_view value : split->values) {
    expect(value.size() >= 2 && value.front() == '[', "a value begins as an array");
    expect(value.data() >= last, "values are in order");
    last = value.data() + value.size();
    taken += value.size() - 2;
  }
  expect(last <= document.data() + document.size(), "values lie in the document");
  expect(split->skeleton.size() + taken == document.size(), "nothing is lost by splitting");
  const auto again = gpubridge::split_data(split->skeleton);
  expect(again && again->skeleton == split->skeleton, "a skeleton is its own skeleton");
}

void check_values(std::string_view text, ElementType type, std::size_t count) {
  std::string packed;
  std::string formatted;
  gpubridge::format_values(text, type, count, formatted);
  if (!gpubridge::pack_values(text, type, count, packed)) return;
  if (type.size != 0) expect(packed.size() == count * type.size, "elements have their size");
  expect(gpubridge::format_values(packed, type, count, formatted), "what was packed is formatted");
  // A double may be too large for a float.
  if (formatted.find("Infinity") != std::string::npos) return;
  std::string again;
  expect(gpubridge::pack_values(formatted, type, count, again), "what was formatted is packed");
  expect(again == packed, "formatting and packing give the same bytes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  const ElementType type = kTypes.at(input.byte() % kTypes.size());
  const std::size_t count = input.byte();
  check_split(input.text());
  check_values(input.text(), type, count);
  return 0;
}
