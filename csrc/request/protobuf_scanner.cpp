#include "request/protobuf_scanner.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "utf8.h"

namespace gpubridge {
namespace {

constexpr std::size_t kMostParameters = 64;
constexpr std::uint64_t kSignBit = std::uint64_t{1} << 63U;

// Tags: the number of a field and its wire type.
constexpr std::uint8_t kVarint = 0;
constexpr std::uint8_t kFixed64 = 1;
constexpr std::uint8_t kBytes = 2;

constexpr std::uint8_t tag(unsigned number, std::uint8_t type) {
  return static_cast<std::uint8_t>(number << 3U | type);
}

constexpr std::uint8_t kModelName = tag(1, kBytes);
constexpr std::uint8_t kModelVersion = tag(2, kBytes);
constexpr std::uint8_t kRequestId = tag(3, kBytes);
constexpr std::uint8_t kRequestParameter = tag(4, kBytes);
constexpr std::uint8_t kInput = tag(5, kBytes);
constexpr std::uint8_t kOutput = tag(6, kBytes);
constexpr std::uint8_t kRawContent = tag(7, kBytes);

constexpr std::uint8_t kName = tag(1, kBytes);
constexpr std::uint8_t kDatatype = tag(2, kBytes);
constexpr std::uint8_t kPackedShape = tag(3, kBytes);
constexpr std::uint8_t kShape = tag(3, kVarint);
constexpr std::uint8_t kInputParameter = tag(4, kBytes);
constexpr std::uint8_t kOutputParameter = tag(2, kBytes);

constexpr std::uint8_t kParameterName = tag(1, kBytes);
constexpr std::uint8_t kParameterValue = tag(2, kBytes);
constexpr std::uint8_t kBoolValue = tag(1, kVarint);
constexpr std::uint8_t kInt64Value = tag(2, kVarint);
constexpr std::uint8_t kStringValue = tag(3, kBytes);
constexpr std::uint8_t kDoubleValue = tag(4, kFixed64);
constexpr std::uint8_t kUint64Value = tag(5, kVarint);

// Whose parameters a map has.
enum class Owner : std::uint8_t { kRequest, kInput, kOutput };

Role number_role(Owner owner, std::string_view name, std::uint8_t type) {
  if (owner != Owner::kRequest) {
    const bool input = owner == Owner::kInput;
    if (type != kInt64Value) return Role::kNone;
    if (name == "shared_memory_offset") return input ? Role::kInputOffset : Role::kOutputOffset;
    if (name == "shared_memory_byte_size") return input ? Role::kInputBytes : Role::kOutputBytes;
    return Role::kNone;
  }
  if (name == "priority") return Role::kPriority;
  if (type != kInt64Value || name == "sequence_start" || name == "sequence_end") return Role::kNone;
  if (name == "timeout") return Role::kTimeout;
  return name == "sequence_id" ? Role::kSequenceNumber : Role::kCustomNumber;
}

Role text_role(Owner owner, std::string_view name) {
  if (owner == Owner::kRequest) {
    return name == "sequence_id" ? Role::kSequenceText : Role::kCustomText;
  }
  if (name != "shared_memory_region") return Role::kNone;
  return owner == Owner::kInput ? Role::kInputRegion : Role::kOutputRegion;
}

// The fields of one message, or of one inside it.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : bytes_(bytes) {}

  [[nodiscard]] bool done() const { return at_ == bytes_.size(); }
  [[nodiscard]] std::size_t at() const { return at_; }

  // Takes a tag of one byte; 0, which is no tag, for any other.
  std::uint8_t tag() {
    const auto byte = static_cast<std::uint8_t>(bytes_[at_++]);
    return byte < 0x80 ? byte : 0;
  }

  bool varint(std::uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; at_ != bytes_.size() && shift < 64; shift += 7) {
      const auto byte = static_cast<std::uint8_t>(bytes_[at_++]);
      if (shift == 63 && byte > 1) return false;
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool bytes(std::string_view& content) {
    std::uint64_t length = 0;
    return varint(length) && take(length, content);
  }

  bool take(std::uint64_t length, std::string_view& content) {
    if (length > bytes_.size() - at_) return false;
    content = bytes_.substr(at_, static_cast<std::size_t>(length));
    at_ += static_cast<std::size_t>(length);
    return true;
  }

 private:
  std::string_view bytes_;
  std::size_t at_ = 0;
};

class Scanner {
 public:
  // Without `offsets` the message has neither an id nor raw contents.
  Scanner(RequestScan& scan, std::vector<std::uint64_t>* offsets)
      : scan_(scan), offsets_(offsets) {}

  bool request(std::string_view message) {
    Fields fields(message);
    std::vector<std::string_view> names;
    std::uint32_t seen = 0;
    while (!fields.done()) {
      const std::uint8_t field = fields.tag();
      std::string_view content;
      if (!fields.bytes(content) || scan_.key.size() > kLongestScanned) return false;
      switch (field) {
        case kModelName:
        case kModelVersion:
          if (!once(seen, field)) return false;
          literal(field, content);
          break;
        case kRequestId:
          if (offsets_ == nullptr || !once(seen, field) || !is_utf8(content)) return false;
          scan_.id = content;
          break;
        case kRequestParameter:
          if (!parameter(content, Owner::kRequest, field, names)) return false;
          break;
        case kInput:
          if (!input(content)) return false;
          break;
        case kOutput:
          if (!output(content)) return false;
          break;
        case kRawContent:
          if (offsets_ == nullptr || offsets_->size() > scan_.inputs + kMostParameters) {
            return false;
          }
          scan_.sizes.push_back(content.size());
          offsets_->push_back(fields.at() - content.size());
          break;
        default:
          return false;
      }
    }
    return scan_.key.size() <= kLongestScanned && assign_sizes();
  }

 private:
  // Whether a singular field comes for the first time.
  static bool once(std::uint32_t& seen, std::uint8_t field) {
    const std::uint32_t bit = std::uint32_t{1} << (field >> 3U);
    const bool first = (seen & bit) == 0;
    seen |= bit;
    return first;
  }

  void literal(std::uint8_t field, std::string_view content) {
    begin(field);
    for (unsigned shift = 0; shift < 32; shift += 8) {
      scan_.key.push_back(static_cast<char>((content.size() >> shift) & 0xFFU));
    }
    scan_.key.append(content);
  }
  void begin(std::uint8_t field) { scan_.key.push_back(static_cast<char>(field)); }
  void end() { scan_.key.push_back('\0'); }
  void mark(Role role) {
    scan_.key.push_back(static_cast<char>(0x80U | static_cast<std::uint8_t>(role)));
  }

  bool input(std::string_view message) {
    begin(kInput);
    owner_ = scan_.inputs++;
    scan_.ranks.push_back(0);
    in_region_.push_back(false);
    Fields fields(message);
    std::vector<std::string_view> names;
    std::uint32_t seen = 0;
    while (!fields.done()) {
      const std::uint8_t field = fields.tag();
      std::uint64_t number = 0;
      std::string_view content;
      if (field == kShape) {
        if (!fields.varint(number) || !dim(number)) return false;
        continue;
      }
      if (!fields.bytes(content)) return false;
      if (field == kName || field == kDatatype) {
        if (!once(seen, field)) return false;
        literal(field, content);
      } else if (field == kPackedShape) {
        if (!packed_shape(content)) return false;
      } else if (field != kInputParameter || !parameter(content, Owner::kInput, field, names)) {
        return false;
      }
    }
    end();
    return true;
  }

  bool packed_shape(std::string_view content) {
    Fields numbers(content);
    std::uint64_t number = 0;
    while (!numbers.done()) {
      if (!numbers.varint(number) || !dim(number)) return false;
    }
    return true;
  }

  bool dim(std::uint64_t number) {
    if (number >= kSignBit) return false;
    mark(Role::kDim);
    scan_.add({.role = Role::kDim, .owner = owner_, .number = number});
    return true;
  }

  bool output(std::string_view message) {
    begin(kOutput);
    owner_ = scan_.outputs++;
    Fields fields(message);
    std::vector<std::string_view> names;
    std::uint32_t seen = 0;
    while (!fields.done()) {
      const std::uint8_t field = fields.tag();
      std::string_view content;
      if (!fields.bytes(content)) return false;
      if (field == kName) {
        if (!once(seen, field)) return false;
        literal(field, content);
      } else if (field != kOutputParameter || !parameter(content, Owner::kOutput, field, names)) {
        return false;
      }
    }
    end();
    return true;
  }

  // Takes an entry of a map: its name, then its value.
  bool parameter(std::string_view entry, Owner owner, std::uint8_t field,
                 std::vector<std::string_view>& names) {
    Fields fields(entry);
    std::string_view name;
    std::string_view value;
    if (fields.done() || fields.tag() != kParameterName || !fields.bytes(name)) return false;
    if (fields.done() || fields.tag() != kParameterValue || !fields.bytes(value)) return false;
    if (!fields.done() || names.size() >= kMostParameters) return false;
    if (std::find(names.begin(), names.end(), name) != names.end()) return false;
    names.push_back(name);
    literal(field, name);
    if (owner == Owner::kInput && name == "shared_memory_region") in_region_[owner_] = true;
    return parameter_value(value, owner, name);
  }

  // Takes the one value that a parameter has, or none.
  bool parameter_value(std::string_view message, Owner owner, std::string_view name) {
    Fields fields(message);
    if (fields.done()) {
      end();
      return true;
    }
    const std::uint8_t type = fields.tag();
    begin(type);
    ScannedValue value{.owner = owner_};
    std::string_view content;
    switch (type) {
      case kBoolValue:
      case kInt64Value:
      case kUint64Value:
        if (!fields.varint(value.number)) return false;
        value.role = number_role(owner, name, type);
        // A negative number is part of the key.
        if (type == kInt64Value && value.number >= kSignBit) value.role = Role::kNone;
        if (type == kBoolValue) value.role = Role::kNone;
        break;
      case kStringValue:
        if (!fields.bytes(value.text)) return false;
        value.role = text_role(owner, name);
        if (value.role != Role::kNone && !is_utf8(value.text)) return false;
        break;
      case kDoubleValue:
        if (!fields.take(sizeof(double), content)) return false;
        break;
      default:
        return false;
    }
    if (!fields.done()) return false;
    if (value.role == Role::kNone) {
      literal(type, message);
      return true;
    }
    if (value.role == Role::kCustomNumber || value.role == Role::kCustomText) value.name = name;
    mark(value.role);
    scan_.add(value);
    return true;
  }

  // Gives the raw contents to the inputs that are not in a region, in order.
  bool assign_sizes() {
    for (std::uint32_t i = 0; i < scan_.inputs; ++i) {
      if (!in_region_[i]) scan_.size_owners.push_back(i);
    }
    return scan_.size_owners.size() == scan_.sizes.size();
  }

  RequestScan& scan_;
  std::vector<std::uint64_t>* offsets_;
  std::vector<bool> in_region_;
  std::uint32_t owner_ = 0;
};

}  // namespace

bool scan_message(std::string_view message, RequestScan& scan,
                  std::vector<std::uint64_t>& offsets) {
  scan.clear();
  offsets.clear();
  return Scanner(scan, &offsets).request(message);
}

bool scan_fields(std::string_view fields, const std::vector<std::uint64_t>& sizes,
                 RequestScan& scan) {
  scan.clear();
  scan.sizes = sizes;
  return Scanner(scan, nullptr).request(fields);
}

}  // namespace gpubridge
