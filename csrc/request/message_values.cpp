#include "request/message_values.h"

#include "little_endian.h"
#include "request/json_values.h"
#include "request/wire.h"
#include "text.h"

namespace gpubridge {
namespace {

// Shorter fields stay where they are.
constexpr std::size_t kLong = std::size_t{1} << 16U;

constexpr std::uint8_t kParameter = wire_tag(4, kWireBytes);
constexpr std::uint8_t kInput = wire_tag(5, kWireBytes);
constexpr std::uint8_t kOutput = wire_tag(6, kWireBytes);
constexpr std::uint8_t kInputParameter = wire_tag(4, kWireBytes);
constexpr std::uint8_t kInputContents = wire_tag(5, kWireBytes);
constexpr std::uint8_t kOutputParameter = wire_tag(2, kWireBytes);

constexpr std::uint8_t kName = wire_tag(1, kWireBytes);
constexpr std::uint8_t kValue = wire_tag(2, kWireBytes);
constexpr std::uint8_t kBool = wire_tag(1, kWireVarint);
constexpr std::uint8_t kInt64 = wire_tag(2, kWireVarint);
constexpr std::uint8_t kString = wire_tag(3, kWireBytes);
constexpr std::uint8_t kDouble = wire_tag(4, kWire64);

// Those that the server itself reads.
constexpr std::array<std::string_view, 5> kRequestNames = {"sequence_id", "sequence_start",
                                                           "sequence_end", "priority", "timeout"};
constexpr std::array<std::string_view, 4> kTensorNames = {
    "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "classification"};

template <typename Names>
bool has(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// An entry of a map: a name and a message with at most one value.
struct Parameter {
  std::string_view entry;
  std::string_view name;
  std::string_view value;

  bool read(std::string_view bytes) {
    entry = bytes;
    WireReader fields(entry);
    if (fields.done() || fields.tag() != kName || !fields.bytes(name) || !is_utf8(name)) {
      return false;
    }
    if (!fields.done() && (fields.tag() != kValue || !fields.bytes(value))) return false;
    WireReader values(value);
    if (!fields.done()) return false;
    if (values.done()) return true;
    const std::uint8_t tag = values.tag();
    std::string_view content;
    return tag != 0 && values.value(tag & 7U, content) && values.done() &&
           (tag != kString || is_utf8(content));
  }

  // Appends the value as JSON; false for one that models are not given.
  bool append_json(std::string& out) const {
    WireReader values(value);
    if (values.done()) return false;
    const std::uint8_t tag = values.tag();
    std::uint64_t number = 0;
    std::string_view content;
    if (tag == kBool) {
      if (!values.varint(number)) return false;
      out += number != 0 ? "true" : "false";
    } else if (tag == kInt64) {
      if (!values.varint(number)) return false;
      out += std::to_string(static_cast<std::int64_t>(number));
    } else if (tag == kString) {
      if (!values.bytes(content)) return false;
      append_json_text(content, out);
    } else if (tag == kDouble) {
      if (!values.take(sizeof(double), content)) return false;
      append_json_number(get_number<double>(content.data()), out);
    } else {
      return false;
    }
    return true;
  }
};

// A number of one field of typed contents; strings are bytes, all others one kind of number.
struct ContentsField {
  unsigned wire;
  std::size_t size;  // of an element of fixed size
};

constexpr std::array<ContentsField, 9> kContents = {{{},
                                                     {kWireVarint, 0},
                                                     {kWireVarint, 0},
                                                     {kWireVarint, 0},
                                                     {kWireVarint, 0},
                                                     {kWireVarint, 0},
                                                     {kWire32, 4},
                                                     {kWire64, 8},
                                                     {kWireBytes, 0}}};

// Returns the first element of packed numbers; false where they are cut short.
bool first_packed(std::string_view packed, const ContentsField& field, std::string_view& first) {
  if (field.size != 0) {
    first = packed.substr(0, field.size);
    return packed.size() % field.size == 0;
  }
  WireReader numbers(packed);
  while (!numbers.done()) {
    const std::size_t begin = numbers.at();
    std::uint64_t number = 0;
    if (!numbers.varint(number)) return false;
    if (begin == 0) first = packed.substr(0, numbers.at());
  }
  return true;
}

// Writes contents with one element in each field that has any.
bool shorten_contents(std::string_view contents, std::string& out) {
  WireReader fields(contents);
  std::array<bool, kContents.size()> seen{};
  while (!fields.done()) {
    const std::uint8_t tag = fields.tag();
    const unsigned number = tag >> 3U;
    const unsigned wire = tag & 7U;
    if (number == 0 || number >= kContents.size()) return false;
    const ContentsField& field = kContents[number];
    std::string_view value;
    if ((wire != field.wire && wire != kWireBytes) || !fields.value(wire, value)) return false;
    std::string_view first = value;
    if (field.wire == kWireBytes) {
      first = {};
    } else if (wire == kWireBytes) {
      if (!first_packed(value, field, first)) return false;
      if (first.empty()) continue;
    }
    if (std::exchange(seen[number], true)) continue;
    append_field(out, wire_tag(number, kWireBytes), first);
  }
  return true;
}

class Splitter {
 public:
  bool form(std::string_view message) {
    WireReader fields(message);
    while (!fields.done()) {
      const std::size_t begin = fields.at();
      const std::uint8_t tag = fields.tag();
      std::string_view content;
      if ((tag & 7U) != kWireBytes || !fields.bytes(content)) return false;
      if (tag == kParameter) {
        Parameter parameter;
        if (!parameter.read(content)) return false;
        // The last of a name is the one that counts.
        parameters_.insert_or_assign(parameter.name, parameter);
      } else if (tag == kInput || tag == kOutput) {
        if (!tensor(tag, content)) return false;
      } else {
        split_.skeleton.append(message.substr(begin, fields.at() - begin));
      }
    }
    take_parameters();
    return true;
  }

  SplitForm take() { return std::move(split_); }

 private:
  void take_parameters() {
    for (const auto& [name, parameter] : parameters_) {
      std::string& json = split_.parameters;
      const std::size_t before = json.size();
      json += json.empty() ? '{' : ',';
      append_json_text(name, json);
      json += ':';
      if (!has(kRequestNames, name) && !name.starts_with("triton_") &&
          parameter.append_json(json)) {
        continue;
      }
      json.resize(before);
      append_field(split_.skeleton, kParameter, parameter.entry);
    }
    if (!split_.parameters.empty()) split_.parameters += '}';
  }

  bool tensor(std::uint8_t tag, std::string_view message) {
    const bool input = tag == kInput;
    std::string_view contents;
    std::string shorter;
    bool typed = false;
    WireReader fields(message);
    while (!fields.done()) {
      const std::size_t begin = fields.at();
      const std::uint8_t field = fields.tag();
      std::string_view content;
      if (field == 0 || !fields.value(field & 7U, content)) return false;
      if (content.size() > kLong && field == (input ? kInputParameter : kOutputParameter)) {
        Parameter parameter;
        if (!parameter.read(content)) return false;
        if (!has(kTensorNames, parameter.name)) continue;
      }
      if (input && field == kInputContents) {
        // Two would be merged.
        if (std::exchange(typed, true)) return false;
        if (content.size() > kLong) {
          contents = content;
          std::string first;
          if (!shorten_contents(contents, first)) return false;
          append_field(shorter, kInputContents, first);
          continue;
        }
      }
      shorter.append(message.substr(begin, fields.at() - begin));
    }
    if (input) split_.contents.push_back(contents);
    append_field(split_.skeleton, tag, shorter);
    return true;
  }

  SplitForm split_;
  std::map<std::string_view, Parameter> parameters_;
};

bool append_varints(std::string_view packed, std::size_t size, std::string& out) {
  WireReader wire(packed);
  while (!wire.done()) {
    std::uint64_t value = 0;
    if (!wire.varint(value)) return false;
    out.append(reinterpret_cast<const char*>(&value), size);
  }
  return true;
}

// The wire type of a value that stands for itself; packed ones are bytes.
unsigned wire_of(WireForm form, std::size_t size) {
  if (form == WireForm::kBytes) return kWireBytes;
  if (form == WireForm::kVarint) return kWireVarint;
  return size == sizeof(std::uint64_t) ? kWire64 : kWire32;
}

bool append_string(std::string_view text, std::string& out) {
  if (text.size() > std::numeric_limits<std::uint32_t>::max()) return false;
  append_number(out, static_cast<std::uint32_t>(text.size()));
  out.append(text);
  return true;
}

}  // namespace

std::optional<SplitForm> split_form(std::string_view form) {
  Splitter splitter;
  if (!splitter.form(form)) return std::nullopt;
  return splitter.take();
}

bool pack_typed_contents(std::string_view message, unsigned field, WireForm form, std::size_t size,
                         std::string& out) {
  const unsigned single = wire_of(form, size);
  WireReader wire(message);
  while (!wire.done()) {
    std::uint64_t tag = 0;
    std::string_view value;
    if (!wire.varint(tag)) return false;
    const auto type = static_cast<unsigned>(tag & 7U);
    if (!(type == kWireGroup ? wire.group() : wire.value(type, value))) return false;
    // As protobuf, which takes a field of another wire type for one that it does not know.
    if (tag >> 3U != field || (type != single && type != kWireBytes)) continue;
    bool good = true;
    if (form == WireForm::kBytes) {
      good = append_string(value, out);
    } else if (form == WireForm::kVarint) {
      good = append_varints(value, size, out);
    } else {
      good = value.size() % size == 0;
      if (good) out.append(value);
    }
    if (!good) return false;
  }
  return true;
}

}  // namespace gpubridge
