#include "request/json_scanner.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "utf8.h"

namespace gpubridge {
namespace {

constexpr int kDeepest = 16;
constexpr std::size_t kMostMembers = 64;

// The place of a value in a request.
enum class Path : std::uint8_t {
  kOther,
  kRequest,
  kId,
  kInputs,
  kInput,
  kShape,
  kDim,
  kData,
  kInputParameters,
  kBinarySize,
  kInputRegion,
  kInputOffset,
  kInputBytes,
  kOutputs,
  kOutput,
  kOutputParameters,
  kOutputRegion,
  kOutputOffset,
  kOutputBytes,
  kParameters,
  kPriority,
  kTimeout,
  kSequence,
  kCustom,
};

Path of_request(std::string_view name) {
  if (name == "id") return Path::kId;
  if (name == "inputs") return Path::kInputs;
  if (name == "outputs") return Path::kOutputs;
  return name == "parameters" ? Path::kParameters : Path::kOther;
}

Path of_input(std::string_view name) {
  if (name == "shape") return Path::kShape;
  if (name == "parameters") return Path::kInputParameters;
  return name == "data" ? Path::kData : Path::kOther;
}

Path of_input_parameters(std::string_view name) {
  if (name == "binary_data_size") return Path::kBinarySize;
  if (name == "shared_memory_region") return Path::kInputRegion;
  if (name == "shared_memory_offset") return Path::kInputOffset;
  return name == "shared_memory_byte_size" ? Path::kInputBytes : Path::kOther;
}

Path of_output_parameters(std::string_view name) {
  if (name == "shared_memory_region") return Path::kOutputRegion;
  if (name == "shared_memory_offset") return Path::kOutputOffset;
  return name == "shared_memory_byte_size" ? Path::kOutputBytes : Path::kOther;
}

Path of_parameters(std::string_view name) {
  if (name == "priority") return Path::kPriority;
  if (name == "timeout") return Path::kTimeout;
  if (name == "sequence_id") return Path::kSequence;
  const bool flag =
      name == "sequence_start" || name == "sequence_end" || name == "binary_data_output";
  return flag ? Path::kOther : Path::kCustom;
}

Path member_path(Path owner, std::string_view name) {
  switch (owner) {
    case Path::kRequest:
      return of_request(name);
    case Path::kInput:
      return of_input(name);
    case Path::kInputParameters:
      return of_input_parameters(name);
    case Path::kOutput:
      return name == "parameters" ? Path::kOutputParameters : Path::kOther;
    case Path::kOutputParameters:
      return of_output_parameters(name);
    case Path::kParameters:
      return of_parameters(name);
    default:
      return Path::kOther;
  }
}

Path element_path(Path owner) {
  switch (owner) {
    case Path::kInputs:
      return Path::kInput;
    case Path::kOutputs:
      return Path::kOutput;
    case Path::kShape:
      return Path::kDim;
    default:
      return Path::kOther;
  }
}

Role number_role(Path path) {
  switch (path) {
    case Path::kDim:
      return Role::kDim;
    case Path::kBinarySize:
      return Role::kBinarySize;
    case Path::kInputOffset:
      return Role::kInputOffset;
    case Path::kInputBytes:
      return Role::kInputBytes;
    case Path::kOutputOffset:
      return Role::kOutputOffset;
    case Path::kOutputBytes:
      return Role::kOutputBytes;
    case Path::kPriority:
      return Role::kPriority;
    case Path::kTimeout:
      return Role::kTimeout;
    case Path::kSequence:
      return Role::kSequenceNumber;
    case Path::kCustom:
      return Role::kCustomNumber;
    default:
      return Role::kNone;
  }
}

Role text_role(Path path) {
  switch (path) {
    case Path::kId:
      return Role::kId;
    case Path::kInputRegion:
      return Role::kInputRegion;
    case Path::kOutputRegion:
      return Role::kOutputRegion;
    case Path::kSequence:
      return Role::kSequenceText;
    case Path::kCustom:
      return Role::kCustomText;
    default:
      return Role::kNone;
  }
}

class Scanner {
 public:
  Scanner(std::string_view text, RequestScan& scan)
      : at_(text.data()), end_(text.data() + text.size()), literal_(text.data()), scan_(scan) {}

  bool run() {
    skip_space();
    if (!next_is('{') || !object(Path::kRequest)) return false;
    skip_space();
    if (at_ != end_) return false;
    scan_.key.append(literal_, end_);
    return true;
  }

 private:
  [[nodiscard]] bool next_is(char wanted) const { return at_ != end_ && *at_ == wanted; }
  [[nodiscard]] bool digit() const { return at_ != end_ && *at_ >= '0' && *at_ <= '9'; }

  void skip_space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }

  bool value(Path path) {
    if (path == Path::kData || at_ == end_) return false;
    switch (*at_) {
      case '{':
        return object(path);
      case '[':
        return array(path);
      case '"':
        return text(path);
      case 't':
        return word("true");
      case 'f':
        return word("false");
      case 'n':
        return word("null");
      default:
        return number(path);
    }
  }

  bool word(std::string_view wanted) {
    if (static_cast<std::size_t>(end_ - at_) < wanted.size()) return false;
    if (std::string_view(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  bool object(Path path) {
    ++at_;
    if (++depth_ > kDeepest) return false;
    const std::size_t first = names_.size();
    skip_space();
    if (next_is('}')) return close(first);
    while (true) {
      skip_space();
      if (!next_is('"') || !member(path, first)) return false;
      skip_space();
      if (next_is('}')) return close(first);
      if (!next_is(',')) return false;
      ++at_;
    }
  }

  bool close(std::size_t first_name) {
    ++at_;
    --depth_;
    names_.resize(first_name);
    return true;
  }

  bool member(Path owner, std::size_t first_name) {
    bool escaped = false;
    std::string_view name;
    if (!quoted(name, escaped) || escaped) return false;
    const auto begin = names_.begin() + static_cast<std::ptrdiff_t>(first_name);
    if (names_.size() - first_name >= kMostMembers) return false;
    if (std::find(begin, names_.end(), name) != names_.end()) return false;
    names_.push_back(name);
    skip_space();
    if (!next_is(':')) return false;
    ++at_;
    skip_space();
    return value(member_path(owner, name));
  }

  bool array(Path path) {
    ++at_;
    if (++depth_ > kDeepest) return false;
    skip_space();
    if (!next_is(']')) {
      while (true) {
        skip_space();
        begin_element(path);
        if (!value(element_path(path))) return false;
        skip_space();
        if (next_is(']')) break;
        if (!next_is(',')) return false;
        ++at_;
      }
    }
    ++at_;
    --depth_;
    return true;
  }

  void begin_element(Path path) {
    if (path == Path::kInputs) {
      owner_ = scan_.inputs++;
      scan_.ranks.push_back(0);
    } else if (path == Path::kOutputs) {
      owner_ = scan_.outputs++;
    }
  }

  // Takes a string, whose quotation marks are not part of `content`.
  bool quoted(std::string_view& content, bool& escaped) {
    const char* begin = ++at_;
    for (; at_ != end_; ++at_) {
      const auto byte = static_cast<unsigned char>(*at_);
      if (byte == '"') {
        content = {begin, static_cast<std::size_t>(at_ - begin)};
        ++at_;
        return true;
      }
      if (byte < 0x20) return false;
      if (byte == '\\') {
        escaped = true;
        if (++at_ == end_ || static_cast<unsigned char>(*at_) < 0x20) return false;
      }
    }
    return false;
  }

  bool text(Path path) {
    const char* begin = at_;
    std::string_view content;
    bool escaped = false;
    if (!quoted(content, escaped)) return false;
    const Role role = text_role(path);
    if (role == Role::kId && escaped) return false;
    if (role == Role::kNone || escaped) return true;
    if (!is_utf8(content)) return false;
    replace(begin, {.role = role, .owner = owner_, .text = content, .name = name_of(path)});
    return true;
  }

  bool number(Path path) {
    const char* begin = at_;
    bool plain = true;
    if (next_is('-')) {
      plain = false;
      ++at_;
    }
    const char* digits = at_;
    while (digit()) ++at_;
    const char* stop = at_;
    if (stop == digits || (*digits == '0' && stop - digits > 1)) return false;
    if (next_is('.')) {
      plain = false;
      ++at_;
      if (!some_digits()) return false;
    }
    if (next_is('e') || next_is('E')) {
      plain = false;
      ++at_;
      if (next_is('+') || next_is('-')) ++at_;
      if (!some_digits()) return false;
    }
    const Role role = number_role(path);
    std::uint64_t value = 0;
    if (plain && role != Role::kNone && fits(digits, stop, value)) {
      replace(begin, {.role = role, .owner = owner_, .number = value, .name = name_of(path)});
    }
    return true;
  }

  bool some_digits() {
    if (!digit()) return false;
    while (digit()) ++at_;
    return true;
  }

  static bool fits(const char* at, const char* stop, std::uint64_t& value) {
    constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
    for (; at != stop; ++at) {
      const auto next = static_cast<std::uint64_t>(*at - '0');
      if (value > (kMost - next) / 10) return false;
      value = value * 10 + next;
    }
    return true;
  }

  [[nodiscard]] std::string_view name_of(Path path) const {
    return path == Path::kCustom ? names_.back() : std::string_view{};
  }

  // Puts the marker into the key instead of what was read since `begin`.
  void replace(const char* begin, const ScannedValue& value) {
    scan_.key.append(literal_, begin);
    scan_.key.push_back(static_cast<char>(value.role));
    literal_ = at_;
    scan_.add(value);
  }

  const char* at_;
  const char* end_;
  const char* literal_;  // Where what is not in the key yet begins.
  RequestScan& scan_;
  std::vector<std::string_view> names_;
  std::uint32_t owner_ = 0;
  int depth_ = 0;
};

}  // namespace

bool scan_json(std::string_view text, RequestScan& scan) {
  scan.clear();
  return text.size() <= kLongestScanned && Scanner(text, scan).run();
}

}  // namespace gpubridge
