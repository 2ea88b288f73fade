// Request scanners: views lie in the request, counts agree, a key and its values are the text
// again, and a request matches its own template.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz.h"
#include "request/scan.h"
#include "request/templates.h"

namespace {

using gpubridge::Role;
using gpubridge::fuzz::expect;

void check_scan(const gpubridge::RequestScan& scan, std::string_view text) {
  const auto inside = [&](std::string_view view) {
    return view.empty() ||
           (view.data() >= text.data() && view.data() + view.size() <= text.data() + text.size());
  };
  expect(inside(scan.id), "the id is a view of the request");
  const std::size_t ranks = std::accumulate(scan.ranks.begin(), scan.ranks.end(), std::size_t{0});
  expect(ranks == scan.dims.size(), "ranks count dims");
  expect(scan.ranks.size() == scan.inputs, "each input has a rank");
  expect(scan.sizes.size() == scan.size_owners.size(), "each size has an owner");
  for (const std::uint32_t owner : scan.size_owners) expect(owner < scan.inputs, "owners exist");
  expect(scan.arrays.size() == scan.array_owners.size(), "each array has an owner");
  for (const std::uint32_t owner : scan.array_owners) expect(owner < scan.inputs, "owners exist");
  for (const std::string_view array : scan.arrays) {
    const bool value = !scan.counts.empty();
    expect(inside(array) && !array.empty() && (value || array.front() == '['),
           "an array is a view of the request");
  }
  expect(scan.counts.empty() || scan.counts.size() == scan.inputs, "each input has a count");
  for (const auto& value : scan.others) {
    expect(inside(value.text), "a value is a view of the request");
  }
}

// Puts the values back into the key of JSON text.
std::string text_of(const gpubridge::RequestScan& scan) {
  std::string text;
  std::size_t dim = 0;
  std::size_t size = 0;
  std::size_t array = 0;
  std::size_t other = 0;
  const auto quoted = [](std::string_view content) { return '"' + std::string(content) + '"'; };
  for (const char character : scan.key) {
    const auto role = static_cast<Role>(character);
    if (character == '\t' || character == '\n' || character == '\r' ||
        static_cast<unsigned char>(character) >= 0x20) {
      text.push_back(character);
    } else if (role == Role::kId) {
      text += quoted(scan.id);
    } else if (role == Role::kDim) {
      text += std::to_string(scan.dims.at(dim++));
    } else if (role == Role::kBinarySize) {
      text += std::to_string(scan.sizes.at(size++));
    } else if (role == Role::kValues) {
      text += scan.arrays.at(array++);
    } else {
      const gpubridge::ScannedValue& value = scan.others.at(other++);
      expect(value.role == role, "values are in the order of their markers");
      text += gpubridge::is_text(role) ? quoted(value.text) : std::to_string(value.number);
    }
  }
  expect(dim == scan.dims.size() && size == scan.sizes.size() && array == scan.arrays.size() &&
             other == scan.others.size(),
         "every value has a marker");
  return text;
}

bool equal_values(const gpubridge::RequestScan& one, const gpubridge::RequestScan& other) {
  const auto equal = [](const gpubridge::ScannedValue& left, const gpubridge::ScannedValue& right) {
    return left.role == right.role && left.owner == right.owner && left.number == right.number &&
           left.text == right.text && left.name == right.name;
  };
  return one.key == other.key && one.id == other.id && one.dims == other.dims &&
         one.ranks == other.ranks && one.sizes == other.sizes &&
         one.size_owners == other.size_owners && one.arrays == other.arrays &&
         one.array_owners == other.array_owners && one.inputs == other.inputs &&
         one.outputs == other.outputs && std::ranges::equal(one.others, other.others, equal);
}

// Reads a header after another one as if it came alone.
void check_following(std::string_view text, std::size_t at) {
  gpubridge::RequestScan after;
  for (const char letter : std::string_view("-0.e\"\\,]} x\x01")) {
    gpubridge::RequestScan alone;
    if (!gpubridge::scan_json(text, after) || text.empty()) return;
    std::string changed(text);
    changed[at++ % changed.size()] = letter;
    const bool scanned = gpubridge::scan_json(changed, alone);
    expect(gpubridge::scan_json(changed, after) == scanned, "a header is read alike after another");
    expect(!scanned || equal_values(alone, after), "it has the same key and values");
  }
}

void check_template(const gpubridge::RequestScan& scan, const gpubridge::RequestScan& again) {
  gpubridge::TemplateRules rules;
  std::size_t dim = 0;
  for (std::uint32_t i = 0; i < scan.inputs; ++i) {
    const std::uint32_t rank = scan.counts.empty() ? scan.ranks[i] : 1;
    gpubridge::InputRule rule;
    rule.dims.assign(rank, -1);
    rule.item_size = 4;
    if (std::ranges::count(scan.array_owners, i) != 0) rule.json = gpubridge::json_type("FP32");
    rules.inputs.push_back(rule);
    dim += rank;
  }
  gpubridge::RequestTemplates templates(std::size_t{1} << 20U);
  const auto owner = std::make_shared<int>();
  if (!templates.add(scan, rules, owner)) return;
  gpubridge::MatchedRequest matched;
  if (!templates.match(again, matched)) return;
  expect(matched.owner == owner, "a request matches its own template");
  expect(matched.dims.size() == dim, "all dims are given");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  const std::uint8_t kind = input.byte();
  const bool json = (kind & 1U) == 0;
  const bool generated = json && (kind & 0x80U) != 0;
  const std::vector<std::string> inputs{"a", "IN"};
  const std::string_view text = input.text();
  if (json && !generated) check_following(text, size * kind);
  gpubridge::RequestScan scan;
  gpubridge::RequestScan again;
  std::vector<std::uint64_t> offsets;
  const auto read = [&](gpubridge::RequestScan& into) {
    into.clear();
    offsets.clear();
    if (generated) return gpubridge::scan_generated(text, inputs, into);
    return json ? gpubridge::scan_json(text, into) : gpubridge::scan_message(text, into, offsets);
  };
  if (!read(scan)) return 0;
  expect(read(again) && again.key == scan.key, "a request has one key");
  check_scan(scan, text);
  if (json) expect(text_of(scan) == text, "a key and its values are the text");
  for (std::size_t index = 0; index < offsets.size(); ++index) {
    expect(offsets[index] <= text.size() && scan.sizes.at(index) <= text.size() - offsets[index],
           "contents lie in the message");
  }
  check_template(scan, again);
  return 0;
}
