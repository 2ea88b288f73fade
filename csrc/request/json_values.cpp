#include "request/json_values.h"

#include <cmath>
#include <type_traits>
#include <unordered_set>

#include "little_endian.h"
#include "request/json_numbers.h"
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
    for (;;) {
      end = find_byte(raw, end, [](ByteWord word) {
        return word.below(0x20) | word.is('\\') | word.no_ascii();
      });
      if (end == raw.size() || raw[end] == '\\') break;
      if (static_cast<unsigned char>(raw[end]) < 0x20U) return false;
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

// Reads the leaves of an array, `count` of them: `read` takes the next one.
template <typename Read>
bool read_leaves(JsonCursor& cursor, std::size_t count, Read read) {
  if (!cursor.take('[')) return false;
  std::size_t found = 0;
  int depth = 1;
  for (bool opened = true;; opened = false) {
    cursor.skip_space();
    while (cursor.take('[')) {
      if (++depth > JsonCursor::kDeepest) return false;
      opened = true;
      cursor.skip_space();
    }
    const bool empty = opened && cursor.peek() == ']';
    if (!empty && (++found > count || !read())) return false;
    for (cursor.skip_space(); !cursor.take(','); cursor.skip_space()) {
      if (!cursor.take(']')) return false;
      if (--depth == 0) return found == count && cursor.at_end();
    }
  }
}

// Reads numbers and booleans, each of which `read` makes of the next one's text.
template <typename Value, typename Read>
bool append_leaves(JsonCursor& cursor, std::size_t count, std::string& out, Read read) {
  const std::size_t begin = out.size();
  out.resize(begin + count * sizeof(Value));
  char* at = out.data() + begin;
  return read_leaves(cursor, count, [&] {
    const std::optional<Value> value = read();
    if (value) at = put_number(at, *value);
    return value.has_value();
  });
}

template <typename Integer>
bool append_integers(JsonCursor& cursor, std::size_t count, std::string& out) {
  using Wide = std::conditional_t<std::is_signed_v<Integer>, std::int64_t, std::uint64_t>;
  return append_leaves<Integer>(cursor, count, out, [&]() -> std::optional<Integer> {
    const auto number = cursor.number();
    const auto value = number ? number->as<Wide>() : std::nullopt;
    if (!value || static_cast<Integer>(*value) != *value) return std::nullopt;
    return static_cast<Integer>(*value);
  });
}

template <typename Signed>
bool append_integers(JsonCursor& cursor, bool is_signed, std::size_t count, std::string& out) {
  return is_signed ? append_integers<Signed>(cursor, count, out)
                   : append_integers<std::make_unsigned_t<Signed>>(cursor, count, out);
}

template <typename Float>
bool append_floats(JsonCursor& cursor, std::size_t count, std::string& out) {
  return append_leaves<Float>(cursor, count, out, [&]() -> std::optional<Float> {
    const auto number = cursor.number();
    if (!number) return std::nullopt;
    // An integer zero has no sign.
    if (number->integer && number->exact() && number->digits == 0) return Float{0};
    const auto value = to_double(*number);
    if (!value) return std::nullopt;
    const auto narrow = static_cast<Float>(*value);
    if (!std::isfinite(narrow)) return std::nullopt;
    return narrow;
  });
}

bool append_booleans(JsonCursor& cursor, std::size_t count, std::string& out) {
  return append_leaves<char>(cursor, count, out, [&]() -> std::optional<char> {
    if (cursor.take("true")) return '\1';
    if (cursor.take("false")) return '\0';
    return std::nullopt;
  });
}

bool append_numbers(JsonCursor& cursor, ElementType type, std::size_t count, std::string& out) {
  const bool is_signed = type.kind == ElementKind::kSigned;
  if (type.kind == ElementKind::kBool) return append_booleans(cursor, count, out);
  if (type.kind == ElementKind::kFloat) {
    return type.size == sizeof(float) ? append_floats<float>(cursor, count, out)
                                      : append_floats<double>(cursor, count, out);
  }
  if (type.size == 1) return append_integers<std::int8_t>(cursor, is_signed, count, out);
  if (type.size == 2) return append_integers<std::int16_t>(cursor, is_signed, count, out);
  if (type.size == 4) return append_integers<std::int32_t>(cursor, is_signed, count, out);
  return append_integers<std::int64_t>(cursor, is_signed, count, out);
}

// Writes elements with a comma between them: `put` writes one and returns its end, which is at most
// kLongestNumber characters away.
template <typename Value, typename Put>
void format_elements(std::string_view bytes, std::string& out, Put put) {
  std::array<char, 4096> text;
  const char* const full = text.data() + text.size() - kLongestNumber - 1;
  char* end = text.data();
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(Value)) {
    if (at != 0) *end++ = ',';
    end = put(end, get_number<Value>(bytes.data() + at));
    if (end > full) {
      out.append(text.data(), end);
      end = text.data();
    }
  }
  out.append(text.data(), end);
}

template <typename Integer>
void format_integers(std::string_view bytes, std::string& out) {
  format_elements<Integer>(bytes, out, [](char* at, Integer value) {
    return std::to_chars(at, at + kLongestNumber, value).ptr;
  });
}

// Of integers of one size.
template <typename Signed>
void format_integers(std::string_view bytes, bool is_signed, std::string& out) {
  is_signed ? format_integers<Signed>(bytes, out)
            : format_integers<std::make_unsigned_t<Signed>>(bytes, out);
}

template <typename Float>
void format_floats(std::string_view bytes, std::string& out) {
  format_elements<Float>(bytes, out, [](char* at, Float value) {
    return put_json_number(at, static_cast<double>(value));
  });
}

void format_numbers(std::string_view bytes, ElementType type, std::string& out) {
  const bool is_signed = type.kind == ElementKind::kSigned;
  if (type.kind == ElementKind::kBool) {
    format_elements<char>(bytes, out, [](char* at, char value) {
      return put_bytes(at, value != 0 ? "true" : "false");
    });
  } else if (type.kind == ElementKind::kFloat) {
    type.size == sizeof(float) ? format_floats<float>(bytes, out)
                               : format_floats<double>(bytes, out);
  } else if (type.size == 1) {
    format_integers<std::int8_t>(bytes, is_signed, out);
  } else if (type.size == 2) {
    format_integers<std::int16_t>(bytes, is_signed, out);
  } else if (type.size == 4) {
    format_integers<std::int32_t>(bytes, is_signed, out);
  } else {
    format_integers<std::int64_t>(bytes, is_signed, out);
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
  if (type.kind == ElementKind::kString) {
    return read_leaves(cursor, count, [&] { return append_string(cursor, out); });
  }
  // Each takes two characters: memory is asked for by what came, not by what the shape says.
  return count <= array.size() / 2 && append_numbers(cursor, type, count, out);
}

bool pack_value(std::string_view text, ElementType type, std::string& out) {
  return pack_values(std::string(1, '[').append(text).append("]"), type, 1, out);
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
  std::array<char, kLongestNumber> text;
  out.append(text.data(), put_json_number(text.data(), value));
}

void append_json_text(std::string_view raw, std::string& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  constexpr std::string_view kLetters = "\b\t\n\f\r\"\\";
  constexpr std::string_view kNames = "btnfr\"\\";
  out += '"';
  std::size_t at = 0;
  while (at < raw.size()) {
    const std::size_t end = find_byte(
        raw, at, [](ByteWord word) { return word.below(0x20) | word.is('"') | word.is('\\'); });
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

JsonParts count_parts(std::string_view document) {
  JsonParts parts;
  bool within_string = false;
  for (std::size_t at = 0; at < document.size(); ++at) {
    const char c = document[at];
    if (within_string) {
      if (c == '\\') ++at;
      within_string = c != '"';
    } else {
      within_string = c == '"';
      parts.members += c == ':' || c == '{' ? 1 : 0;
      parts.arrays += c == '[' ? 1 : 0;
      parts.divided += c == ',' ? 1 : 0;
    }
  }
  return parts;
}

}  // namespace gpubridge
