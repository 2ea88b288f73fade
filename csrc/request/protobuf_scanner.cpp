#include "little_endian.h"
#include "request/scan.h"
#include "request/wire.h"
#include "text.h"

namespace gpubridge {
namespace {

constexpr std::size_t kMostParameters = 64;
constexpr std::uint64_t kSignBit = std::uint64_t{1} << 63U;

// Tags.
constexpr std::uint8_t kModelName = wire_tag(1, kWireBytes);
constexpr std::uint8_t kModelVersion = wire_tag(2, kWireBytes);
constexpr std::uint8_t kRequestId = wire_tag(3, kWireBytes);
constexpr std::uint8_t kRequestParameter = wire_tag(4, kWireBytes);
constexpr std::uint8_t kInput = wire_tag(5, kWireBytes);
constexpr std::uint8_t kOutput = wire_tag(6, kWireBytes);
constexpr std::uint8_t kRawContent = wire_tag(7, kWireBytes);

constexpr std::uint8_t kName = wire_tag(1, kWireBytes);
constexpr std::uint8_t kDatatype = wire_tag(2, kWireBytes);
constexpr std::uint8_t kPackedShape = wire_tag(3, kWireBytes);
constexpr std::uint8_t kShape = wire_tag(3, kWireVarint);
constexpr std::uint8_t kInputParameter = wire_tag(4, kWireBytes);
constexpr std::uint8_t kOutputParameter = wire_tag(2, kWireBytes);

constexpr std::uint8_t kParameterName = wire_tag(1, kWireBytes);
constexpr std::uint8_t kParameterValue = wire_tag(2, kWireBytes);
constexpr std::uint8_t kBoolValue = wire_tag(1, kWireVarint);
constexpr std::uint8_t kInt64Value = wire_tag(2, kWireVarint);
constexpr std::uint8_t kStringValue = wire_tag(3, kWireBytes);
constexpr std::uint8_t kDoubleValue = wire_tag(4, kWire64);
constexpr std::uint8_t kUint64Value = wire_tag(5, kWireVarint);

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

class Scanner {
 public:
  // Without `offsets` the message has neither an id nor raw contents.
  Scanner(RequestScan& scan, std::vector<std::uint64_t>* offsets)
      : scan_(scan), offsets_(offsets) {}

  bool request(std::string_view message) {
    WireReader fields(message);
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
          if (!tensor(content, Owner::kInput)) return false;
          break;
        case kOutput:
          if (!tensor(content, Owner::kOutput)) return false;
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
  // True if a singular field comes for the first time.
  static bool once(std::uint32_t& seen, std::uint8_t field) {
    const std::uint32_t bit = std::uint32_t{1} << (field >> 3U);
    const bool first = (seen & bit) == 0;
    seen |= bit;
    return first;
  }

  void literal(std::uint8_t field, std::string_view content) {
    begin(field);
    append_number(scan_.key, static_cast<std::uint32_t>(content.size()));
    scan_.key.append(content);
  }
  void begin(std::uint8_t field) { scan_.key.push_back(static_cast<char>(field)); }
  void end() { scan_.key.push_back('\0'); }
  void mark(Role role) {
    scan_.key.push_back(static_cast<char>(0x80U | static_cast<std::uint8_t>(role)));
  }

  // Takes an input or an output; only inputs have a datatype and a shape.
  bool tensor(std::string_view message, Owner owner) {
    const bool input = owner == Owner::kInput;
    begin(input ? kInput : kOutput);
    owner_ = input ? scan_.inputs++ : scan_.outputs++;
    if (input) {
      scan_.ranks.push_back(0);
      in_region_.push_back(false);
    }
    WireReader fields(message);
    std::vector<std::string_view> names;
    std::uint32_t seen = 0;
    while (!fields.done()) {
      const std::uint8_t field = fields.tag();
      std::uint64_t number = 0;
      std::string_view content;
      if (input && field == kShape) {
        if (!fields.varint(number) || !dim(number)) return false;
        continue;
      }
      if (!fields.bytes(content)) return false;
      if (field == kName || (input && field == kDatatype)) {
        if (!once(seen, field)) return false;
        literal(field, content);
      } else if (input && field == kPackedShape) {
        if (!packed_shape(content)) return false;
      } else if (field != (input ? kInputParameter : kOutputParameter) ||
                 !parameter(content, owner, field, names)) {
        return false;
      }
    }
    end();
    return true;
  }

  bool packed_shape(std::string_view content) {
    WireReader numbers(content);
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

  // Takes an entry of a map: its name, then its value.
  bool parameter(std::string_view entry, Owner owner, std::uint8_t field,
                 std::vector<std::string_view>& names) {
    WireReader fields(entry);
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
    WireReader fields(message);
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
