#include "request/json_values.h"

#include <cmath>
#include <cstdlib>
#include <unordered_set>

#include "little_endian.h"
#include "request/json_cursor.h"
#include "request/wire.h"
#include "text.h"

namespace gpubridge {
namespace {

// Moves behind a value of any kind.
bool skip_value(JsonCursor& cursor) {
  cursor.skip_space();
  if (cursor.take('"')) return cursor.raw_string().has_value();
  if (cursor.take('[') || cursor.take('{')) return cursor.skip_nested();
  const std::size_t start = cursor.position();
  while (!cursor.at_end() &&
         std::string_view(",]} \t\n\r").find(cursor.peek()) == std::string_view::npos) {
    cursor.next();
  }
  return cursor.position() > start;
}

// Visits the members of an object whose opening bracket has been taken: `visit` gets each name and
// moves behind its value. False where that does, a name has an escape, or it is no object.
template <typename Visit>
bool visit_members(JsonCursor& cursor, Visit visit) {
  cursor.skip_space();
  if (cursor.take('}')) return true;
  do {
    cursor.skip_space();
    if (!cursor.take('"')) return false;
    const auto name = cursor.raw_string();
    if (!name || name->find('\\') != std::string_view::npos) return false;
    cursor.skip_space();
    if (!cursor.take(':') || !visit(*name)) return false;
    cursor.skip_space();
  } while (cursor.take(','));
  return cursor.take('}');
}

bool split_input(JsonCursor& cursor, std::string_view document, SplitDocument& split,
                 std::size_t& copied) {
  bool found = false;
  return visit_members(cursor, [&](std::string_view name) {
    if (name != "data") return skip_value(cursor);
    if (found) return false;
    found = true;
    cursor.skip_space();
    const std::size_t start = cursor.position();
    if (cursor.peek() != '[') return skip_value(cursor);
    if (!skip_value(cursor)) return false;
    split.skeleton.append(document.substr(copied, start - copied)).append("[]");
    split.values.push_back(document.substr(start, cursor.position() - start));
    copied = cursor.position();
    return true;
  });
}

bool split_inputs(JsonCursor& cursor, std::string_view document, SplitDocument& split,
                  std::size_t& copied) {
  cursor.skip_space();
  if (!cursor.take('[')) return skip_value(cursor);
  cursor.skip_space();
  if (cursor.take(']')) return true;
  do {
    cursor.skip_space();
    if (cursor.take('{')) {
      if (!split_input(cursor, document, split, copied)) return false;
    } else if (!skip_value(cursor)) {
      return false;
    }
    cursor.skip_space();
  } while (cursor.take(','));
  return cursor.take(']');
}

// ---- numbers ----

constexpr std::array<double, 23> kPowersOfTen = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                                 1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                                 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

// The usual numbers exactly: up to 15 digits and a small power of ten, which one operation on
// doubles rounds correctly.
std::optional<double> to_double_quickly(const JsonNumber& number) {
  std::uint64_t mantissa = 0;
  int significant = 0;
  int exponent = 0;
  bool fraction = false;
  std::size_t at = number.negative ? 1 : 0;
  for (; at < number.whole.size(); ++at) {
    const char letter = number.whole[at];
    if (letter == '.') {
      fraction = true;
    } else if (JsonCursor::is_digit(letter)) {
      if (mantissa != 0 || letter != '0') ++significant;
      if (significant > 15) return std::nullopt;
      mantissa = mantissa * 10 + static_cast<std::uint64_t>(letter - '0');
      if (fraction) --exponent;
    } else {
      int power = 0;
      const char* first = number.whole.data() + at + 1;
      if (*first == '+') ++first;
      const auto read = std::from_chars(first, number.whole.data() + number.whole.size(), power);
      if (read.ec != std::errc() || power < -100 || power > 100) return std::nullopt;
      exponent += power;
      break;
    }
  }
  if (exponent < -22 || exponent > 22) return std::nullopt;
  const auto value = static_cast<double>(mantissa);
  const double power = kPowersOfTen[static_cast<std::size_t>(std::abs(exponent))];
  const double scaled = exponent < 0 ? value / power : value * power;
  return number.negative ? -scaled : scaled;
}

std::optional<double> to_double(const JsonNumber& number) {
  if (const auto value = to_double_quickly(number)) return value;
  // Not from_chars, which not every standard library has for doubles. The process keeps the numeric
  // locale "C", as Python needs it, too.
  const std::string text(number.whole);
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end != text.c_str() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

// ---- strings ----

void append_utf8(std::uint32_t point, std::string& out) {
  if (point < 0x80) {
    out += static_cast<char>(point);
  } else if (point < 0x800) {
    out += static_cast<char>(0xC0U | point >> 6U);
    out += static_cast<char>(0x80U | (point & 0x3FU));
  } else if (point < 0x10000) {
    out += static_cast<char>(0xE0U | point >> 12U);
    out += static_cast<char>(0x80U | (point >> 6U & 0x3FU));
    out += static_cast<char>(0x80U | (point & 0x3FU));
  } else {
    out += static_cast<char>(0xF0U | point >> 18U);
    out += static_cast<char>(0x80U | (point >> 12U & 0x3FU));
    out += static_cast<char>(0x80U | (point >> 6U & 0x3FU));
    out += static_cast<char>(0x80U | (point & 0x3FU));
  }
}

std::optional<std::uint32_t> hex4(std::string_view text) {
  std::uint32_t value = 0;
  if (text.size() < 4) return std::nullopt;
  const auto read = std::from_chars(text.data(), text.data() + 4, value, 16);
  if (read.ec != std::errc() || read.ptr != text.data() + 4) return std::nullopt;
  return value;
}

// The code point of an escape `uXXXX`, or of two that are a surrogate pair; moves `at` behind it.
std::optional<std::uint32_t> escaped_point(std::string_view raw, std::size_t& at) {
  const auto first = hex4(raw.substr(at));
  if (!first) return std::nullopt;
  at += 4;
  if (*first < 0xD800 || *first > 0xDFFF) return first;
  if (*first > 0xDBFF || raw.substr(at, 2) != "\\u") return std::nullopt;
  const auto second = hex4(raw.substr(at + 2));
  if (!second || *second < 0xDC00 || *second > 0xDFFF) return std::nullopt;
  at += 6;
  return 0x10000U + ((*first - 0xD800U) << 10U) + (*second - 0xDC00U);
}

bool append_escape(std::string_view raw, std::size_t& at, std::string& out) {
  constexpr std::string_view kNames = "\"\\/bfnrt";
  constexpr std::string_view kLetters = "\"\\/\b\f\n\r\t";
  const char name = raw[at++];
  if (name == 'u') {
    const auto point = escaped_point(raw, at);
    if (point) append_utf8(*point, out);
    return point.has_value();
  }
  const std::size_t index = kNames.find(name);
  if (index == std::string_view::npos) return false;
  out += kLetters[index];
  return true;
}

bool append_decoded(std::string_view raw, std::string& out) {
  std::size_t at = 0;
  while (at < raw.size()) {
    std::size_t end = at;
    while (end < raw.size()) {
      const auto byte = static_cast<unsigned char>(raw[end]);
      if (byte < 0x20U) return false;
      if (byte == '\\') break;
      const std::size_t length = utf8_length(raw, end);
      if (length == 0) return false;
      end += length;
    }
    out.append(raw.substr(at, end - at));
    at = end;
    if (at < raw.size() && !append_escape(raw, ++at, out)) return false;
  }
  return true;
}

// ---- elements ----

// Appends the low bytes of a number.
template <typename Number>
void append_low_bytes(const Number& number, std::size_t size, std::string& out) {
  out.append(reinterpret_cast<const char*>(&number), size);
}

bool append_string(JsonCursor& cursor, std::string& out) {
  if (!cursor.take('"')) return false;
  const auto raw = cursor.raw_string();
  if (!raw) return false;
  const std::size_t head = out.size();
  out.append(sizeof(std::uint32_t), '\0');
  if (!append_decoded(*raw, out)) return false;
  const std::size_t size = out.size() - head - sizeof(std::uint32_t);
  if (size > std::numeric_limits<std::uint32_t>::max()) return false;
  put_number(out.data() + head, static_cast<std::uint32_t>(size));
  return true;
}

bool append_value(JsonCursor& cursor, ElementType type, std::string& out) {
  if (type.kind == ElementKind::kString) return append_string(cursor, out);
  if (type.kind == ElementKind::kBool) {
    const bool value = cursor.take("true");
    if (!value && !cursor.take("false")) return false;
    out += static_cast<char>(value);
    return true;
  }
  const auto number = cursor.number();
  if (!number) return false;
  if (type.kind == ElementKind::kFloat) {
    // An integer zero has no sign.
    const auto value = number->whole == "-0" ? 0.0 : to_double(*number);
    if (!value) return false;
    const auto single = static_cast<float>(*value);
    if (type.size == sizeof(float) && !std::isfinite(single)) return false;
    type.size == sizeof(float) ? append_number(out, single) : append_number(out, *value);
    return true;
  }
  const auto append_if = [&]<typename Number>(const std::optional<Number>& value) {
    // The bits above the element's repeat its sign, or are zeros.
    const auto above = static_cast<unsigned>(8 * (sizeof(Number) - type.size));
    if (!value || static_cast<Number>(*value << above) >> above != *value) return false;
    append_low_bytes(*value, type.size, out);
    return true;
  };
  return type.kind == ElementKind::kSigned ? append_if(number->as<std::int64_t>())
                                           : append_if(number->as<std::uint64_t>());
}

template <typename Value>
void append_elements(std::string_view bytes, std::string& out) {
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(Value)) {
    if (at != 0) out += ',';
    const auto value = get_number<Value>(bytes.data() + at);
    if constexpr (std::is_floating_point_v<Value>) {
      append_json_number(static_cast<double>(value), out);
    } else {
      append_integer(out, value);
    }
  }
}

// Of integers of one size.
template <typename Signed>
void append_elements(std::string_view bytes, bool is_signed, std::string& out) {
  is_signed ? append_elements<Signed>(bytes, out)
            : append_elements<std::make_unsigned_t<Signed>>(bytes, out);
}

void format_numbers(std::string_view bytes, ElementType type, std::string& out) {
  const bool is_signed = type.kind == ElementKind::kSigned;
  if (type.kind == ElementKind::kBool) {
    for (const char& value : bytes) {
      if (&value != bytes.data()) out += ',';
      out += value != 0 ? "true" : "false";
    }
  } else if (type.kind == ElementKind::kFloat) {
    type.size == sizeof(float) ? append_elements<float>(bytes, out)
                               : append_elements<double>(bytes, out);
  } else if (type.size == 1) {
    append_elements<std::int8_t>(bytes, is_signed, out);
  } else if (type.size == 2) {
    append_elements<std::int16_t>(bytes, is_signed, out);
  } else if (type.size == 4) {
    append_elements<std::int32_t>(bytes, is_signed, out);
  } else {
    append_elements<std::int64_t>(bytes, is_signed, out);
  }
}

// ---- parameters ----

// Makes a field of the content that `out` has from `begin` on.
void enclose(std::string& out, std::size_t begin, char tag) {
  std::string head(1, tag);
  append_varint(head, out.size() - begin);
  out.insert(begin, head);
}

// Appends the value of a parameter as an InferParameter.
bool append_parameter(JsonCursor& cursor, std::string& out) {
  constexpr char kBool = 1 << 3;
  constexpr char kInt64 = 2 << 3;
  constexpr char kString = 3 << 3 | 2;
  constexpr char kUint64 = 5 << 3;
  cursor.skip_space();
  if (cursor.take('"')) {
    const auto raw = cursor.raw_string();
    const std::size_t begin = out.size();
    if (!raw || !append_decoded(*raw, out)) return false;
    enclose(out, begin, kString);
    return true;
  }
  const bool yes = cursor.take("true");
  if (yes || cursor.take("false")) {
    out += {kBool, static_cast<char>(yes)};
    return true;
  }
  const auto number = cursor.number();
  if (!number) return false;
  const auto integer = number->as<std::int64_t>();
  const auto wide = integer ? static_cast<std::uint64_t>(*integer) : number->as<std::uint64_t>();
  if (!wide) return false;
  out += integer ? kInt64 : kUint64;
  append_varint(out, *wide);
  return true;
}

bool format_strings(std::string_view bytes, std::size_t count, std::string& out) {
  std::size_t at = 0;
  for (std::size_t index = 0; index < count; ++index) {
    if (bytes.size() - at < sizeof(std::uint32_t)) return false;
    const auto length = get_number<std::uint32_t>(bytes.data() + at);
    at += sizeof length;
    if (length > bytes.size() - at) return false;
    if (index != 0) out += ',';
    append_json_text(bytes.substr(at, length), out);
    at += length;
  }
  return at == bytes.size();
}

constexpr std::array<std::pair<std::string_view, ElementType>, 12> kTypes = {{
    {"BOOL", {ElementKind::kBool, 1}},
    {"INT8", {ElementKind::kSigned, 1}},
    {"INT16", {ElementKind::kSigned, 2}},
    {"INT32", {ElementKind::kSigned, 4}},
    {"INT64", {ElementKind::kSigned, 8}},
    {"UINT8", {ElementKind::kUnsigned, 1}},
    {"UINT16", {ElementKind::kUnsigned, 2}},
    {"UINT32", {ElementKind::kUnsigned, 4}},
    {"UINT64", {ElementKind::kUnsigned, 8}},
    {"FP32", {ElementKind::kFloat, 4}},
    {"FP64", {ElementKind::kFloat, 8}},
    {"BYTES", {ElementKind::kString, 0}},
}};

}  // namespace

std::optional<ElementType> json_type(std::string_view datatype) {
  for (const auto& [name, type] : kTypes) {
    if (name == datatype) return type;
  }
  return std::nullopt;
}

std::optional<SplitDocument> split_data(std::string_view document) {
  JsonCursor cursor(document);
  SplitDocument split;
  std::size_t copied = 0;
  bool found = false;
  cursor.skip_space();
  if (!cursor.take('{')) return std::nullopt;
  const bool whole = visit_members(cursor, [&](std::string_view name) {
    if (name != "inputs") return skip_value(cursor);
    if (found) return false;
    found = true;
    return split_inputs(cursor, document, split, copied);
  });
  if (!whole) return std::nullopt;
  split.skeleton.append(document.substr(copied));
  return split;
}

std::optional<SplitDocument> split_long_strings(std::string_view document) {
  constexpr std::size_t kLongString = std::size_t{1} << 16U;
  JsonCursor cursor(document);
  SplitDocument split;
  std::size_t copied = 0;
  while (!cursor.at_end()) {
    if (cursor.next() != '"') continue;
    const std::size_t start = cursor.position();
    const auto raw = cursor.raw_string();
    if (!raw) return std::nullopt;
    if (raw->size() <= kLongString) {
      if (raw->find("\\u0000") != std::string_view::npos) return std::nullopt;
      continue;
    }
    cursor.skip_space();
    if (cursor.peek() == ':') return std::nullopt;
    split.skeleton.append(document.substr(copied, start - copied)).append("\\u0000");
    split.skeleton.append(std::to_string(split.values.size()));
    split.values.push_back(*raw);
    copied = start + raw->size();
  }
  split.skeleton.append(document.substr(copied));
  return split;
}

bool append_plain_string(std::string_view raw, std::string& out) {
  std::string decoded;
  if (!append_decoded(raw, decoded)) return false;
  append_json_text(decoded, out);
  return true;
}

bool pack_values(std::string_view array, ElementType type, std::size_t count, std::string& out) {
  JsonCursor cursor(array);
  std::size_t found = 0;
  int depth = 0;
  if (type.kind != ElementKind::kString && count <= array.size()) {
    out.reserve(out.size() + count * type.size);
  }
  if (!cursor.take('[')) return false;
  ++depth;
  // True if a value may come next (after a bracket or a comma), and if one must (after a comma).
  bool may = true;
  bool must = false;
  while (depth != 0) {
    cursor.skip_space();
    if (may && cursor.take('[')) {
      if (++depth > JsonCursor::kDeepest) return false;
      must = false;
    } else if (!must && cursor.take(']')) {
      --depth;
      may = false;
    } else if (!may && cursor.take(',')) {
      may = must = true;
    } else {
      if (!may || ++found > count || !append_value(cursor, type, out)) return false;
      may = must = false;
    }
  }
  return found == count && cursor.at_end();
}

bool format_values(std::string_view bytes, ElementType type, std::size_t count, std::string& out) {
  out.assign(1, '[');
  if (type.kind == ElementKind::kString) {
    if (!format_strings(bytes, count, out)) return false;
  } else {
    if (bytes.size() % type.size != 0 || bytes.size() / type.size != count) return false;
    format_numbers(bytes, type, out);
  }
  out += ']';
  return true;
}

bool pack_parameters(std::string_view object, std::string& out) {
  constexpr char kParameter = 4 << 3 | 2;
  constexpr char kName = 1 << 3 | 2;
  constexpr char kValue = 2 << 3 | 2;
  JsonCursor cursor(object);
  std::unordered_set<std::string_view> names;
  if (!cursor.take('{')) return false;
  const bool whole = visit_members(cursor, [&](std::string_view name) {
    const std::size_t entry = out.size();
    if (!names.insert(name).second || !append_decoded(name, out)) return false;
    enclose(out, entry, kName);
    const std::size_t value = out.size();
    if (!append_parameter(cursor, out)) return false;
    enclose(out, value, kValue);
    enclose(out, entry, kParameter);
    return true;
  });
  return whole && cursor.at_end();
}

void append_json_number(double value, std::string& out) {
  if (!std::isfinite(value)) {
    out += std::isnan(value) ? "NaN" : value < 0 ? "-Infinity" : "Infinity";
    return;
  }
  std::array<char, 32> text{};
  const auto written = std::to_chars(text.data(), text.data() + text.size(), value);
  const std::string_view digits(text.data(), static_cast<std::size_t>(written.ptr - text.data()));
  out += digits;
  // A reader has to see a float.
  if (digits.find_first_of(".e") == std::string_view::npos) out += ".0";
}

void append_json_text(std::string_view raw, std::string& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  constexpr std::string_view kLetters = "\b\t\n\f\r\"\\";
  constexpr std::string_view kNames = "btnfr\"\\";
  out += '"';
  std::size_t at = 0;
  while (at < raw.size()) {
    std::size_t end = at;
    while (end < raw.size() && static_cast<unsigned char>(raw[end]) >= 0x20U && raw[end] != '"' &&
           raw[end] != '\\') {
      ++end;
    }
    out.append(raw.substr(at, end - at));
    at = end;
    if (at == raw.size()) break;
    const char letter = raw[at++];
    const std::size_t index = kLetters.find(letter);
    if (index != std::string_view::npos) {
      out += '\\';
      out += kNames[index];
    } else {
      out += "\\u00";
      out += kHex[static_cast<unsigned char>(letter) >> 4U];
      out += kHex[static_cast<unsigned char>(letter) & 0xFU];
    }
  }
  out += '"';
}

bool format_string(std::string_view text, std::string& out) {
  if (!is_utf8(text)) return false;
  append_json_text(text, out);
  return true;
}

}  // namespace gpubridge
