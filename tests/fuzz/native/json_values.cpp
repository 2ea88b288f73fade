// Values of JSON arrays: what is packed is formatted and packed again to the same bytes, and a
// document is the sum of the parts that it is split into. An object's members are packed as they
// are.
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
  static_cast<void>(gpubridge::format_values(text, type, count, formatted));
  if (!gpubridge::pack_values(text, type, count, packed)) return;
  if (type.size != 0) expect(packed.size() == count * type.size, "elements have their size");
  expect(gpubridge::format_values(packed, type, count, formatted), "what was packed is formatted");
  // A double may be too large for a float.
  if (formatted.find("Infinity") != std::string::npos) return;
  std::string again;
  expect(gpubridge::pack_values(formatted, type, count, again), "what was formatted is packed");
  expect(again == packed, "formatting and packing give the same bytes");
}

// Reads fields of encoded parameters, all of whose content is theirs.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : bytes_(bytes) {}

  [[nodiscard]] bool done() const { return bytes_.empty(); }

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0;; shift += 7) {
      expect(!bytes_.empty() && shift < 70, "a number is whole");
      const auto byte = static_cast<unsigned char>(bytes_[0]);
      bytes_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
  }

  std::string_view content() {
    const std::uint64_t size = varint();
    expect(size <= bytes_.size(), "a field lies in its message");
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  std::string_view field(std::uint64_t number) {
    expect(varint() == (number << 3U | 2U), "a field is the one that comes next");
    return content();
  }

 private:
  std::string_view bytes_;
};

// What was packed of a JSON object says the same object, and that is packed to the same bytes.
void check_parameters(std::string_view object) {
  std::string packed;
  if (!gpubridge::pack_parameters(object, packed)) return;
  std::string text = "{";
  for (Fields message(packed); !message.done();) {
    Fields entry(message.field(4));
    if (text.size() > 1) text += ',';
    expect(gpubridge::format_string(entry.field(1), text), "a name is UTF-8");
    text += ':';
    Fields value(entry.field(2));
    switch (value.varint()) {
      case 1 << 3:
        text += value.varint() != 0 ? "true" : "false";
        break;
      case 2 << 3:
        text += std::to_string(static_cast<std::int64_t>(value.varint()));
        break;
      case 3 << 3 | 2:
        expect(gpubridge::format_string(value.content(), text), "a text is UTF-8");
        break;
      case 5 << 3:
        text += std::to_string(value.varint());
        break;
      default:
        expect(false, "a parameter has a known type");
    }
    expect(value.done() && entry.done(), "a parameter is one value");
  }
  text += '}';
  std::string again;
  // Names with an escape are left to Python.
  const bool plain = gpubridge::pack_parameters(text, again);
  expect(!plain || again == packed, "an object is packed to the same bytes");
  expect(plain || text.find('\\') != std::string::npos, "an object is packed again");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  const std::uint8_t kind = input.byte();
  if (kind >= 240) {
    check_parameters(input.text());
    return 0;
  }
  const ElementType type = kTypes.at(kind % kTypes.size());
  const std::size_t count = input.byte();
  check_split(input.text());
  check_values(input.text(), type, count);
  return 0;
}
