#include "request/response_templates.h"

#include "request/json_values.h"
#include "request/wire.h"
#include "text.h"

namespace gpubridge {
namespace {

constexpr std::size_t kUsualOutput = 96;  // Shape, size and brackets of an output.
constexpr char kId = 0x1A;
constexpr char kOutput = 0x2A;
constexpr char kRawOutput = 0x32;
constexpr char kShape = 0x1A;
constexpr char kInferResponse = 0x12;

void append_dims(std::string& json, std::span<const std::int64_t> dims) {
  json.push_back('[');
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (i != 0) json.push_back(',');
    append_integer(json, dims[i]);
  }
  json.push_back(']');
}

std::string frame_prefix(std::uint64_t nbytes) {
  std::string prefix(1, '\0');
  for (unsigned shift = 32; shift != 0; shift -= 8) {
    prefix.push_back(static_cast<char>((nbytes >> (shift - 8)) & 0xFFU));
  }
  return prefix;
}

}  // namespace

std::string JsonResponseTemplate::encode(std::string_view id, std::string_view parameters,
                                         std::span<const ResponseOutput> outputs) const {
  std::string json(1, '{');
  std::size_t expected = names_.size() + parameters.size() + id.size();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    expected += openings_[i].size() + outputs[i].json.size() + kUsualOutput;
  }
  json.reserve(expected);
  if (!id.empty()) {
    json.append("\"id\":");
    append_json_text(id, json);
    json.push_back(',');
  }
  json.append(names_);
  if (!parameters.empty()) json.append(",\"parameters\":").append(parameters);
  json.append(",\"outputs\":[");
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (i != 0) json.push_back(',');
    json.append(openings_[i]);
    append_dims(json, outputs[i].dims);
    if (forms_[i] == OutputForm::kBinary) {
      json.append(",\"parameters\":{\"binary_data_size\":");
      append_integer(json, outputs[i].nbytes);
      json.push_back('}');
    } else if (forms_[i] == OutputForm::kJson) {
      json.append(",\"data\":").append(outputs[i].json);
    }
    json.push_back('}');
  }
  json.append("]}");
  return json;
}

void GeneratedTemplate::append(std::string_view id, std::span<const std::string> outputs,
                               std::string& json) const {
  json.push_back('{');
  bool first = true;
  for (const GeneratedMember& member : members_) {
    if (member.source == GeneratedMember::kId && id.empty()) continue;
    if (!first) json.push_back(',');
    first = false;
    json.append(member.name);
    if (member.source == GeneratedMember::kText) {
      json.append(member.text);
    } else if (member.source == GeneratedMember::kId) {
      append_json_text(id, json);
    } else {
      json.append(outputs[static_cast<std::size_t>(member.source)]);
    }
  }
  json.push_back('}');
}

ResponseFrame MessageResponseTemplate::encode(std::string_view id, std::string_view parameters,
                                              std::span<const ResponseOutput> outputs, bool stream,
                                              std::uint64_t following) const {
  std::string head = names_;
  if (!id.empty()) append_field(head, kId, id);
  head.append(parameters);
  std::string shape;
  std::string output;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    output = openings_[i];
    if (!outputs[i].dims.empty()) {
      shape.clear();
      for (const std::int64_t dim : outputs[i].dims) {
        append_varint(shape, static_cast<std::uint64_t>(dim));
      }
      append_field(output, kShape, shape);
    }
    append_field(head, kOutput, output);
  }
  ResponseFrame frame;
  frame.tags.reserve(outputs.size());
  std::uint64_t nbytes = head.size() + following;
  for (const ResponseOutput& raw : outputs) {
    std::string& tag = frame.tags.emplace_back(1, kRawOutput);
    append_varint(tag, raw.nbytes);
    nbytes += tag.size() + raw.nbytes;
  }
  std::string before;
  if (stream) {
    before.push_back(kInferResponse);
    append_varint(before, nbytes);
  }
  frame.nbytes = nbytes + before.size();
  frame.opening = frame_prefix(frame.nbytes) + before + head;
  return frame;
}

}  // namespace gpubridge
