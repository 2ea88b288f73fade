// Response templates: what they write is read again, and is what was to be told.
#include "request/response_templates.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz.h"

namespace {

using gpubridge::OutputForm;
using gpubridge::ResponseOutput;
using gpubridge::fuzz::expect;

// What a response says, and what its template has.
struct Told {
  std::string id;
  std::string parameters;
  std::string names;
  std::vector<std::string> openings;
  std::vector<OutputForm> forms;
  std::vector<std::vector<std::int64_t>> dims;
  std::vector<std::string> json;
  std::vector<std::uint64_t> nbytes;

  [[nodiscard]] std::vector<ResponseOutput> outputs() const {
    std::vector<ResponseOutput> outputs;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      outputs.push_back({.dims = dims[i], .nbytes = nbytes[i], .json = json[i]});
    }
    return outputs;
  }
};

std::uint64_t number(gpubridge::fuzz::Input& input) {
  std::uint64_t value = 0;
  for (int count = input.byte() % 9; count > 0; --count) value = value << 8U | input.byte();
  return value;
}

std::string text(gpubridge::fuzz::Input& input) {
  std::string made;
  for (int count = input.byte() % 200; count > 0; --count) {
    made.push_back(static_cast<char>(input.byte()));
  }
  return made;
}

// A text within JSON is read back by `Json`.
std::string quoted(std::string_view content) { return '"' + std::string(content) + '"'; }

Told told(gpubridge::fuzz::Input& input) {
  Told made;
  made.id = text(input);
  made.names = quoted("model_name") + ":" + quoted("m");
  made.parameters = (input.byte() & 1U) != 0 ? "{}" : "";
  for (int count = input.byte() % 4; count > 0; --count) {
    made.openings.push_back("{\"name\":\"o\",\"shape\":");
    made.forms.push_back(static_cast<OutputForm>(input.byte() % 3));
    made.json.push_back("[" + std::to_string(input.byte()) + "]");
    made.nbytes.push_back(number(input) >> 24U);
    auto& dims = made.dims.emplace_back();
    for (int rank = input.byte() % 5; rank > 0; --rank) {
      dims.push_back(static_cast<std::int64_t>(number(input)));
    }
  }
  return made;
}

// Reads JSON of which all but texts and numbers is known.
class Json {
 public:
  explicit Json(std::string_view text) : text_(text) {}

  bool skip(std::string_view wanted) {
    if (!text_.starts_with(wanted)) return false;
    text_.remove_prefix(wanted.size());
    return true;
  }
  void take(std::string_view wanted) { expect(skip(wanted), "JSON has its form"); }

  std::string string() {
    take("\"");
    std::string content;
    while (!skip("\"")) {
      expect(!text_.empty() && static_cast<unsigned char>(text_[0]) >= 0x20, "a text is a text");
      const char character = next();
      content.push_back(character == '\\' ? escaped() : character);
    }
    return content;
  }

  // As it is written.
  std::string digits() {
    const std::size_t end = std::min(text_.find_first_not_of("-0123456789"), text_.size());
    std::string made(text_.substr(0, end));
    text_.remove_prefix(end);
    return made;
  }

  [[nodiscard]] bool done() const { return text_.empty(); }

 private:
  char next() {
    const char character = text_[0];
    text_.remove_prefix(1);
    return character;
  }

  char escaped() {
    expect(!text_.empty(), "an escape is whole");
    const char character = next();
    const std::string_view letters = "btnfr\"\\";
    if (character != 'u') {
      expect(letters.find(character) != std::string_view::npos, "an escape is one of JSON's");
      return "\b\t\n\f\r\"\\"[letters.find(character)];
    }
    take("00");
    const std::string hex(text_.substr(0, 2));
    char* end = nullptr;
    const auto code = static_cast<char>(std::strtol(hex.c_str(), &end, 16));
    expect(hex.size() == 2 && end == hex.c_str() + 2, "an escape has its digits");
    text_.remove_prefix(2);
    return code;
  }

  std::string_view text_;
};

void check_json(const Told& told) {
  const gpubridge::JsonResponseTemplate known({told.names, told.openings, told.forms}, {});
  const std::string header = known.encode(told.id, told.parameters, told.outputs());
  Json json(header);
  json.take("{");
  if (!told.id.empty()) {
    json.take("\"id\":");
    expect(json.string() == told.id, "an id is told as it is");
    json.take(",");
  }
  json.take(told.names);
  if (!told.parameters.empty()) json.take(",\"parameters\":" + told.parameters);
  json.take(",\"outputs\":[");
  for (std::size_t i = 0; i < told.dims.size(); ++i) {
    if (i != 0) json.take(",");
    json.take(told.openings[i] + "[");
    for (std::size_t axis = 0; axis < told.dims[i].size(); ++axis) {
      if (axis != 0) json.take(",");
      expect(json.digits() == std::to_string(told.dims[i][axis]), "a dim is told as it is");
    }
    json.take("]");
    if (told.forms[i] == OutputForm::kBinary) {
      json.take(",\"parameters\":{\"binary_data_size\":");
      expect(json.digits() == std::to_string(told.nbytes[i]), "a size is told as it is");
      json.take("}");
    } else if (told.forms[i] == OutputForm::kJson) {
      json.take(",\"data\":" + told.json[i]);
    }
    json.take("}");
  }
  json.take("]}");
  expect(json.done(), "nothing comes behind a header");
}

// Reads an encoded message.
class Message {
 public:
  explicit Message(std::string_view bytes) : bytes_(bytes) {}

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
      expect(!bytes_.empty(), "a number is whole");
      const auto byte = static_cast<unsigned char>(bytes_[0]);
      bytes_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
    expect(false, "a number has at most ten bytes");
    return 0;
  }

  std::string_view take(std::size_t size) {
    expect(size <= bytes_.size(), "a field lies in its message");
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  std::string_view field(std::uint64_t number) {
    expect(varint() == (number << 3U | 2U), "a field is the one that comes next");
    return take(varint());
  }

  [[nodiscard]] bool done() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

void check_message(const Told& told, bool stream, std::uint64_t following) {
  const gpubridge::MessageResponseTemplate known({told.names, told.openings, told.forms});
  const auto outputs = told.outputs();
  const auto frame = known.encode(told.id, told.parameters, outputs, stream, following);
  expect(frame.tags.size() == outputs.size(), "each output has its bytes");
  std::uint64_t behind = 0;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Message tag(frame.tags[i]);
    expect(tag.varint() == (6U << 3U | 2U) && tag.varint() == told.nbytes[i] && tag.done(),
           "the bytes of an output come with their number");
    behind += frame.tags[i].size() + told.nbytes[i];
  }
  expect(frame.nbytes == frame.opening.size() - 5 + behind + following, "a frame counts its bytes");
  Message message(frame.opening);
  const std::string_view prefix = message.take(5);
  std::uint64_t length = 0;
  for (const char byte : prefix.substr(1)) length = length << 8U | static_cast<unsigned char>(byte);
  expect(prefix[0] == 0 && length == (frame.nbytes & 0xFFFFFFFFU), "a frame says its length");
  if (stream) {
    expect(message.varint() == (2U << 3U | 2U), "a response lies in that of the stream");
    const std::uint64_t inner = message.varint();
    std::string number;
    for (std::uint64_t rest = inner; rest > 0x7F; rest >>= 7U) number.push_back(' ');
    expect(inner + number.size() + 2 == frame.nbytes, "a response says its length");
  }
  expect(message.take(told.names.size()) == told.names, "the names come first");
  if (!told.id.empty()) expect(message.field(3) == told.id, "an id is told as it is");
  expect(message.take(told.parameters.size()) == told.parameters, "parameters are told");
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Message output(message.field(5));
    expect(output.take(told.openings[i].size()) == told.openings[i], "an output is itself");
    if (!told.dims[i].empty()) {
      Message shape(output.field(3));
      for (const std::int64_t dim : told.dims[i]) {
        expect(shape.varint() == static_cast<std::uint64_t>(dim), "a dim is told as it is");
      }
      expect(shape.done(), "a shape has its rank");
    }
    expect(output.done(), "nothing comes behind a shape");
  }
  expect(message.done(), "nothing comes behind the outputs");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  const std::uint8_t kind = input.byte();
  const Told made = told(input);
  check_json(made);
  check_message(made, (kind & 1U) != 0, kind / 2U * 7);
  return 0;
}
