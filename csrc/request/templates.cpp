#include "request/templates.h"

#include <iterator>

#include "little_endian.h"

namespace gpubridge {
namespace {

constexpr std::uint64_t kDimLimit = std::uint64_t{1} << 63U;
constexpr std::uint64_t kBytesLimit = std::uint64_t{1} << 62U;
constexpr std::size_t kLongestSequenceText = 128;
constexpr std::size_t kEntryOverhead = 512;
constexpr std::size_t kShareOfEntry = 8;

// Multiplies; false for a product of 2^63 or more.
bool multiply(std::uint64_t& product, std::uint64_t factor) {
  if (factor != 0 && product >= kDimLimit / factor) return false;
  product *= factor;
  return true;
}

std::size_t bytes_of(const std::string& key, const TemplateRules& rules) {
  std::size_t bytes = kEntryOverhead + key.size();
  for (const InputRule& rule : rules.inputs) {
    bytes += sizeof rule + sizeof(std::int64_t) * (rule.dims.size() + rule.reshape.size());
  }
  return bytes;
}

// Checks that each input has the values that its check needs, and no others.
bool checkable(const RequestScan& scan, const TemplateRules& rules) {
  if (scan.inputs != rules.inputs.size()) return false;
  const bool flat = !scan.counts.empty();
  if (flat && scan.counts.size() != scan.inputs) return false;
  std::vector<std::size_t> sizes(rules.inputs.size());
  std::vector<std::size_t> arrays(rules.inputs.size());
  for (const std::uint32_t owner : scan.size_owners) ++sizes[owner];
  for (const std::uint32_t owner : scan.array_owners) ++arrays[owner];
  for (std::size_t i = 0; i < rules.inputs.size(); ++i) {
    const InputRule& rule = rules.inputs[i];
    if (scan.ranks[i] != (flat ? 0U : rule.dims.size())) return false;
    if (sizes[i] != (rule.in_region || rule.json ? 0U : 1U)) return false;
    if (arrays[i] != (rule.json ? 1U : 0U)) return false;
    if (rules.max_batch_size != 0 && rule.dims.empty()) return false;
  }
  return true;
}

// Checks one request against the rules of its template.
class Check {
 public:
  Check(const RequestScan& scan, const TemplateRules& rules, MatchedRequest& matched)
      : scan_(scan), rules_(rules), matched_(matched), region_bytes_(rules.inputs.size()) {}

  bool run() {
    if (!others()) return false;
    matched_.dims.clear();
    matched_.places.clear();
    matched_.owners.clear();
    matched_.json.clear();
    matched_.batch_size = 1;
    matched_.nbytes = matched_.end = 0;
    for (std::size_t i = 0; i < rules_.inputs.size(); ++i) {
      if (!input(i)) return false;
    }
    return true;
  }

 private:
  bool others() {
    for (std::size_t i = 0; i < rules_.inputs.size(); ++i) {
      region_bytes_[i] = rules_.inputs[i].region_bytes;
    }
    for (const ScannedValue& value : scan_.others) {
      if (value.role == Role::kSequenceText && value.text.size() > kLongestSequenceText) {
        return false;
      }
      if (value.role == Role::kInputBytes) region_bytes_[value.owner] = value.number;
    }
    return true;
  }

  bool input(std::size_t index) {
    const InputRule& rule = rules_.inputs[index];
    if (!find_shape(index)) return false;
    const std::span<const std::uint64_t> shape(shape_);
    std::uint64_t elements = 1;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const std::int64_t wanted = rule.dims[i];
      if (shape[i] >= kDimLimit) return false;
      if (wanted >= 0 && shape[i] != static_cast<std::uint64_t>(wanted)) return false;
      if (!multiply(elements, shape[i])) return false;
    }
    if (rules_.max_batch_size != 0 && !batch(index, shape[0])) return false;
    std::uint64_t needed = elements;
    if (!multiply(needed, rule.item_size)) return false;
    add_dims(rule, shape);
    if (rule.json) {
      matched_.json.push_back(
          {matched_.places.size(), scan_.arrays[matched_.json.size()], *rule.json, elements});
      return place(index, needed, elements);
    }
    const std::uint64_t given = rule.in_region ? region_bytes_[index] : scan_.sizes[size_at_++];
    if (rule.item_size != 0 && needed != given) return false;
    return rule.in_region || place(index, given, elements);
  }

  // The dims of an input are those of the request, or those that its number of values fills: the
  // last variable one takes what the others leave.
  bool find_shape(std::size_t index) {
    const std::vector<std::int64_t>& wanted = rules_.inputs[index].dims;
    if (scan_.counts.empty()) {
      const std::uint64_t* const dims = scan_.dims.data() + dim_at_;
      shape_.assign(dims, dims + wanted.size());
      dim_at_ += wanted.size();
      return true;
    }
    std::uint64_t left = scan_.counts[index];
    shape_.assign(wanted.size(), 1);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i] < 0) continue;
      shape_[i] = static_cast<std::uint64_t>(wanted[i]);
      if (shape_[i] == 0 || left % shape_[i] != 0) return false;
      left /= shape_[i];
    }
    const auto variable = std::ranges::find_if(wanted.rbegin(), wanted.rend(),
                                               [](std::int64_t dim) { return dim < 0; });
    if (variable == wanted.rend()) return left == 1;
    shape_[static_cast<std::size_t>(wanted.rend() - variable) - 1] = left;
    return true;
  }

  bool batch(std::size_t index, std::uint64_t size) {
    if (size == 0 || size > rules_.max_batch_size) return false;
    if (index != 0 && size != matched_.batch_size) return false;
    matched_.batch_size = size;
    return true;
  }

  bool place(std::size_t index, std::uint64_t nbytes, std::uint64_t elements) {
    const std::uint64_t past = matched_.end % rules_.alignment;
    const std::uint64_t at = past == 0 ? matched_.end : matched_.end + (rules_.alignment - past);
    if (nbytes >= kBytesLimit || at >= kBytesLimit - nbytes) return false;
    const std::uint32_t item_size = rules_.inputs[index].item_size;
    matched_.places.push_back({.at = at,
                               .nbytes = nbytes,
                               .strings = item_size == 0 ? elements : 0,
                               .item_size = item_size});
    matched_.owners.push_back(index);
    matched_.end = at + nbytes;
    matched_.nbytes += nbytes;
    return true;
  }

  // Appends the dims that the model sees. The variable ones of a reshape are those of the input.
  void add_dims(const InputRule& rule, std::span<const std::uint64_t> shape) {
    std::vector<std::int64_t>& dims = matched_.dims;
    if (!rule.reshaped) {
      for (const std::uint64_t dim : shape) dims.push_back(static_cast<std::int64_t>(dim));
      return;
    }
    const std::size_t batched = rules_.max_batch_size != 0 ? 1 : 0;
    if (batched != 0) dims.push_back(static_cast<std::int64_t>(shape[0]));
    std::size_t next = batched;
    for (const std::int64_t dim : rule.reshape) {
      if (dim >= 0) {
        dims.push_back(dim);
        continue;
      }
      while (rule.dims[next] >= 0) ++next;
      dims.push_back(static_cast<std::int64_t>(shape[next++]));
    }
  }

  const RequestScan& scan_;
  const TemplateRules& rules_;
  MatchedRequest& matched_;
  std::vector<std::uint64_t> region_bytes_;
  std::vector<std::uint64_t> shape_;
  std::size_t dim_at_ = 0;
  std::size_t size_at_ = 0;
};

// Checks that a reshape takes exactly the variable dims of its input.
bool sound(const InputRule& rule, std::size_t batched) {
  if (!rule.reshaped) return true;
  if (rule.dims.size() < batched) return false;
  const auto variable = [](std::int64_t dim) { return dim < 0; };
  const auto first = rule.dims.begin() + static_cast<std::ptrdiff_t>(batched);
  return std::count_if(first, rule.dims.end(), variable) ==
         std::count_if(rule.reshape.begin(), rule.reshape.end(), variable);
}

}  // namespace

bool RequestTemplates::add(const RequestScan& scan, TemplateRules rules,
                           std::shared_ptr<void> owner) {
  const std::size_t batched = rules.max_batch_size != 0 ? 1 : 0;
  const auto is_sound = [batched](const InputRule& rule) { return sound(rule, batched); };
  if (!checkable(scan, rules) || rules.alignment == 0 ||
      !std::all_of(rules.inputs.begin(), rules.inputs.end(), is_sound)) {
    return false;
  }
  const std::size_t bytes = bytes_of(scan.key, rules);
  if (bytes > limit_ / kShareOfEntry) return false;
  const auto known = by_key_.find(scan.key);
  if (known != by_key_.end()) drop(known->second);
  while (bytes_ + bytes > limit_) drop(std::prev(entries_.end()));
  entries_.push_front({scan.key, std::move(rules), std::move(owner), bytes});
  by_key_.emplace(entries_.front().key, entries_.begin());
  bytes_ += bytes;
  return true;
}

void RequestTemplates::remove_if(const std::function<bool(const std::shared_ptr<void>&)>& is_gone) {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (is_gone(entry->owner)) drop(entry);
    entry = next;
  }
}

void RequestTemplates::drop(Entries::iterator entry) {
  bytes_ -= entry->bytes;
  by_key_.erase(entry->key);
  entries_.erase(entry);
}

bool RequestTemplates::match(const RequestScan& scan, MatchedRequest& matched) {
  const auto found = by_key_.find(scan.key);
  if (found == by_key_.end()) return false;
  const auto entry = found->second;
  if (entry != entries_.begin()) entries_.splice(entries_.begin(), entries_, entry);
  matched.owner = entry->owner;
  return Check(scan, entry->rules, matched).run();
}

std::optional<std::uint64_t> align_inputs(std::span<unsigned char> memory, std::uint64_t start,
                                          std::vector<InputPlace>& places) {
  std::vector<std::uint64_t> starts;
  starts.reserve(places.size());
  std::uint64_t end = 0;
  for (const InputPlace& place : places) {
    const std::uint64_t size = place.item_size == 0 ? 1 : place.item_size;
    const std::uint64_t here = std::max(start + place.at, end);
    const std::uint64_t there = (here + size - 1) / size * size;
    if (there > memory.size() || place.nbytes > memory.size() - there) return std::nullopt;
    starts.push_back(there);
    end = there + place.nbytes;
  }
  std::uint64_t moved = 0;
  // From the last on: each moves up, into space that the one after it has left.
  for (std::size_t i = places.size(); i-- > 0;) {
    InputPlace& place = places[i];
    if (starts[i] != start + place.at && place.nbytes != 0) {
      std::memmove(memory.data() + starts[i], memory.data() + start + place.at, place.nbytes);
      moved += place.nbytes;
    }
    place.at = starts[i] - start;
  }
  return moved;
}

bool holds_strings(std::span<const unsigned char> bytes, std::uint64_t count) {
  std::string_view left(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (; !left.empty(); --count) {
    if (count == 0 || !take_string(left)) return false;
  }
  return count == 0;
}

}  // namespace gpubridge
