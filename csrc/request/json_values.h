// Values of JSON arrays to the bytes of tensors and back, without Python and so without its lock.
//
// Accepts what orjson accepts, with the same meaning, and nothing else: where it says no, Python
// parses the same bytes and words the error.
#pragma once

#include "std.h"

namespace gpubridge {

enum class ElementKind { kBool, kSigned, kUnsigned, kFloat, kString };

// The element type of a tensor: its kind and, strings excepted, its size in bytes (1, 2, 4 or 8).
struct ElementType {
  ElementKind kind;
  std::size_t size;
};

// The type of a datatype's elements in JSON; nothing where JSON cannot carry them.
[[nodiscard]] std::optional<ElementType> json_type(std::string_view datatype);

// JSON of more bytes, and the text of more bytes of values, are a worker's: HEAVY_BYTES of
// gpubridge/engine/workers.py.
constexpr std::size_t kLongestJson = std::size_t{1} << 20U;

// A JSON document without values that may be long, and where those are.
struct SplitDocument {
  // The document with something short in the place of each value that was taken out.
  std::string skeleton;
  // The taken values in order: views of the document.
  std::vector<std::string_view> values;
};

// What a parser makes objects of: the members and objects of a document, its arrays, and the commas
// behind its values.
struct JsonParts {
  std::size_t members = 0;
  std::size_t arrays = 0;
  std::size_t divided = 0;
};

// Counts the parts of a JSON document, which need not be valid.
[[nodiscard]] JsonParts count_parts(std::string_view document);

// Takes the `data` arrays, brackets included, out of a request's JSON, which has empty arrays in
// their places then. Nothing where a name has an escape, `inputs` or `data` come twice in an
// object, brackets do not match or nesting is deeper than 64. What is kept and what is taken has
// still to be parsed: nothing else is checked here.
[[nodiscard]] std::optional<SplitDocument> split_data(std::string_view document);

// Takes the text of each string of more than 64 KiB out of a JSON document, which has a NUL and the
// text's number in its place then. Nothing where a name is that long, a string that stays has an
// escaped NUL, or one does not end. All has still to be parsed, as above.
[[nodiscard]] std::optional<SplitDocument> split_long_strings(std::string_view document);

// Appends the text between the quotation marks of a JSON string, decoded and encoded anew, so that
// it has no needless escapes. False where it is no such text.
[[nodiscard]] bool append_plain_string(std::string_view raw, std::string& out);

// Appends the leaves of an array, which may be nested, as `count` elements behind one another;
// strings as a BYTES tensor has them. Integers and FP32 are within their range. False where a value
// is of another kind, the number of values is another, or the text is no JSON.
[[nodiscard]] bool pack_values(std::string_view array, ElementType type, std::size_t count,
                               std::string& out);

// Appends one value as an element, as `pack_values` does those of an array.
[[nodiscard]] bool pack_value(std::string_view text, ElementType type, std::string& out);

// Writes elements as a flat JSON array. Floats have the shortest digits that give the same double;
// those that are not finite are NaN, Infinity and -Infinity. Strings are escaped as JSON has to be,
// their other bytes go out as they are. False where a BYTES tensor is malformed or holds another
// number of strings.
[[nodiscard]] bool format_values(std::string_view bytes, ElementType type, std::size_t count,
                                 std::string& out);

// Appends the members of a JSON object as the parameters of a ModelInferResponse. False where one
// is no boolean, no string and no integer of 64 bits, a name has an escape or comes twice, or the
// text is more or less than an object.
[[nodiscard]] bool pack_parameters(std::string_view object, std::string& out);

// Appends a text, which is UTF-8, as a JSON string with its quotation marks.
void append_json_text(std::string_view text, std::string& out);

// Appends a number with the shortest digits that give the same double; those that are not finite
// are NaN, Infinity and -Infinity.
void append_json_number(double value, std::string& out);

// The same as `append_json_text` for any bytes; false where they are no UTF-8.
[[nodiscard]] bool format_string(std::string_view text, std::string& out);

}  // namespace gpubridge
