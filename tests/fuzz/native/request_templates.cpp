// Request templates: what is accepted is what plain arithmetic accepts, and says the same of it;
// inputs are moved to their places without a change.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fuzz.h"
#include "request/templates.h"

namespace {

using namespace gpubridge;
using fuzz::expect;

constexpr std::size_t kLimit = 16384;
__extension__ using Wide = unsigned __int128;

std::uint64_t number(fuzz::Input& input) {
  // Mostly small ones, and those at the limits.
  const std::uint8_t kind = input.byte();
  if (kind < 224) return kind % 16;
  return (std::uint64_t{1} << (kind % 32U * 2 + 1)) - 1 + input.byte() % 3;
}

// A request, and the template that it may have.
struct Case {
  RequestScan scan;
  TemplateRules rules;
};

Case make(fuzz::Input& input) {
  Case made;
  made.scan.inputs = input.byte() % 4;
  made.rules.max_batch_size = input.byte() % 4;
  made.rules.alignment = input.byte() % 3 == 0 ? input.byte() % 3 : 64;
  for (std::uint32_t i = 0; i < made.scan.inputs; ++i) {
    InputRule rule;
    const std::uint8_t kind = input.byte();
    const std::size_t rank = kind % 4;
    for (std::size_t axis = 0; axis < rank; ++axis) {
      const std::uint8_t dim = input.byte();
      rule.dims.push_back(dim % 2 == 0 ? -1 : dim % 16);
      made.scan.dims.push_back(number(input));
    }
    made.scan.ranks.push_back(static_cast<std::uint32_t>(rank + (kind == 255 ? 1 : 0)));
    if (kind == 255) made.scan.dims.push_back(number(input));
    rule.item_size = std::array{0U, 1U, 2U, 4U, 8U}.at(input.byte() % 5);
    rule.in_region = input.byte() % 4 == 0;
    if (!rule.in_region && kind % 8 == 4) {
      rule.json = ElementType{ElementKind::kUnsigned, rule.item_size};
      made.scan.add({.role = Role::kValues, .owner = i, .text = "[]"});
    }
    rule.region_bytes = number(input);
    rule.reshaped = input.byte() % 4 == 0;
    for (int axis = input.byte() % 4; rule.reshaped && axis > 0; --axis) {
      const std::uint8_t dim = input.byte();
      rule.reshape.push_back(dim % 2 == 0 ? -1 : dim % 16);
    }
    if ((!rule.in_region && !rule.json) || input.byte() == 7) {
      made.scan.sizes.push_back(number(input));
      made.scan.size_owners.push_back(i);
    } else if (rule.in_region && input.byte() % 2 == 0) {
      made.scan.add({.role = Role::kInputBytes, .owner = i, .number = number(input)});
    }
    made.rules.inputs.push_back(std::move(rule));
  }
  made.scan.key = std::string(input.byte(), 'k');
  return made;
}

std::optional<Wide> product(const std::vector<std::uint64_t>& dims, std::uint64_t item_size,
                            Wide limit) {
  Wide made = 1;
  for (const std::uint64_t dim : dims) {
    made *= dim;
    if (dim >= limit || made >= limit) return std::nullopt;
  }
  made *= item_size;
  if (made >= limit) return std::nullopt;
  return made;
}

// What a matched request must say, by plain arithmetic; nothing where it is not that of its
// template, or a product reaches the limit.
std::optional<MatchedRequest> expected(const Case& request, Wide limit) {
  MatchedRequest made;
  std::size_t dim = 0;
  std::size_t size = 0;
  for (std::uint32_t i = 0; i < request.scan.inputs; ++i) {
    const InputRule& rule = request.rules.inputs[i];
    const std::vector<std::uint64_t> shape(
        request.scan.dims.begin() + static_cast<std::ptrdiff_t>(dim),
        request.scan.dims.begin() + static_cast<std::ptrdiff_t>(dim + rule.dims.size()));
    dim += rule.dims.size();
    std::vector<std::int64_t> variable;
    const bool batched = request.rules.max_batch_size != 0;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      if (rule.dims[axis] >= 0 && std::cmp_not_equal(rule.dims[axis], shape[axis])) return {};
      if (rule.dims[axis] < 0 && !(batched && axis == 0)) {
        variable.push_back(static_cast<std::int64_t>(shape[axis]));
      }
    }
    if (batched) {
      if (shape[0] == 0 || shape[0] > request.rules.max_batch_size) return {};
      if (i != 0 && shape[0] != made.batch_size) return {};
      made.batch_size = shape[0];
    }
    std::uint64_t given = rule.region_bytes;
    for (const ScannedValue& value : request.scan.others) {
      if (value.owner == i) given = value.number;
    }
    if (!rule.in_region && !rule.json) given = request.scan.sizes[size++];
    const auto needed = product(shape, rule.item_size == 0 ? 1 : rule.item_size, limit);
    if (rule.json && needed) given = rule.item_size == 0 ? 0 : static_cast<std::uint64_t>(*needed);
    if (!needed || (rule.item_size != 0 && *needed != given)) return {};
    std::vector<std::int64_t> seen(shape.begin(), shape.end());
    if (rule.reshaped) {
      seen.resize(batched ? 1 : 0);
      std::size_t next = 0;
      for (const std::int64_t wanted : rule.reshape) {
        seen.push_back(wanted >= 0 ? wanted : variable.at(next++));
      }
    }
    made.dims.insert(made.dims.end(), seen.begin(), seen.end());
    if (rule.in_region) continue;
    const std::uint64_t step = request.rules.alignment;
    const std::uint64_t at = (made.end + step - 1) / step * step;
    if (Wide{at} + given >= Wide{1} << 62U) return {};
    made.places.push_back({.at = at,
                           .nbytes = given,
                           .strings = rule.item_size == 0 ? static_cast<std::uint64_t>(*needed) : 0,
                           .item_size = rule.item_size});
    made.owners.push_back(i);
    made.end = at + given;
    made.nbytes += given;
  }
  return made;
}

bool equal(const MatchedRequest& one, const MatchedRequest& other) {
  const auto same = [](const InputPlace& a, const InputPlace& b) {
    return a.at == b.at && a.nbytes == b.nbytes && a.strings == b.strings &&
           a.item_size == b.item_size;
  };
  return one.batch_size == other.batch_size && one.nbytes == other.nbytes && one.end == other.end &&
         one.dims == other.dims && one.owners == other.owners &&
         one.places.size() == other.places.size() &&
         std::equal(one.places.begin(), one.places.end(), other.places.begin(), same);
}

// Moves the inputs of a small request, and looks whether each has the bytes that it had.
void check_places(fuzz::Input& input, std::vector<InputPlace> places, std::uint64_t end) {
  if (end > 2048) return;
  const std::uint64_t start = input.byte() % 65;
  std::vector<unsigned char> memory(start + end + input.byte() % 32);
  std::iota(memory.begin(), memory.end(), input.byte());
  const auto contents = [&](std::uint64_t base) {
    std::vector<std::vector<unsigned char>> made;
    for (const InputPlace& place : places) {
      expect(base + place.at + place.nbytes <= memory.size(), "an input lies in its memory");
      const auto* const at = memory.data() + base + place.at;
      made.emplace_back(at, at + place.nbytes);
    }
    return made;
  };
  const auto before = contents(start);
  const std::vector<unsigned char> untouched = memory;
  if (!align_inputs(memory, start, places)) {
    expect(memory == untouched, "inputs that do not fit are not moved");
    return;
  }
  expect(contents(start) == before, "an input that is moved has the same bytes");
  std::uint64_t last = 0;
  for (const InputPlace& place : places) {
    const std::uint64_t size = place.item_size == 0 ? 1 : place.item_size;
    expect((start + place.at) % size == 0, "items begin at multiples of their size");
    expect(place.at >= last, "inputs do not overlap");
    last = place.at + place.nbytes;
  }
}

void check_strings(std::span<const std::uint8_t> bytes, std::uint64_t count) {
  std::uint64_t found = 0;
  std::size_t at = 0;
  bool whole = true;
  while (whole && at < bytes.size()) {
    whole = bytes.size() - at >= 4;
    if (!whole) break;
    std::uint64_t length = 0;
    for (std::size_t i = 4; i-- > 0;) length = length << 8U | bytes[at + i];
    whole = length <= bytes.size() - at - 4;
    at += 4 + (whole ? length : 0);
    ++found;
  }
  expect(holds_strings(bytes, count) == (whole && found == count), "strings are counted");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  RequestTemplates templates(kLimit);
  for (int turn = 0; turn < 8 && !input.rest().empty(); ++turn) {
    const Case first = make(input);
    const auto owner = std::make_shared<int>(turn);
    const bool added = templates.add(first.scan, first.rules, owner);
    expect(templates.bytes() <= kLimit, "templates take no more than they may");
    if (!added) continue;
    // Another request of the same key has other numbers.
    Case second = first;
    for (std::uint64_t& dim : second.scan.dims) dim = input.byte() % 4 == 0 ? number(input) : dim;
    for (std::uint64_t& nbytes : second.scan.sizes) {
      nbytes = input.byte() % 4 == 0 ? number(input) : nbytes;
    }
    for (const Case* each : {&first, &std::as_const(second)}) {
      MatchedRequest matched;
      const bool taken = templates.match(each->scan, matched);
      // Products a little below 2^63 may be left to Python.
      if (expected(*each, Wide{1} << 61U)) expect(taken, "what is right is accepted");
      if (!taken) continue;
      const auto wanted = expected(*each, Wide{1} << 63U);
      expect(wanted.has_value(), "what is accepted is right");
      expect(matched.owner == owner, "a request has the template of its key");
      expect(equal(matched, *wanted), "a request is what its numbers say");
      check_places(input, matched.places, matched.end);
    }
  }
  check_strings(input.rest().first(std::min<std::size_t>(input.rest().size(), 256)),
                input.byte() % 8);
  templates.remove_if([](const std::shared_ptr<void>&) { return true; });
  expect(templates.size() == 0 && templates.bytes() == 0, "nothing is left of what is removed");
  return 0;
}
