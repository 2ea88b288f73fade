// Templates of responses: what all responses with the same outputs have in common, filled with
// dims, sizes and the id of each.
#pragma once

#include "request/json_values.h"
#include "std.h"

namespace gpubridge {

// Encoding of an output: its bytes behind the header or message, JSON values in the header, or
// nothing, since it lies in memory that the client registered.
enum class OutputForm : std::uint8_t { kElsewhere = 0, kBinary = 1, kJson = 2 };

// One output of a response. `nbytes` counts its bytes; `json` are its values.
struct ResponseOutput {
  std::span<const std::int64_t> dims;
  std::uint64_t nbytes = 0;
  std::string_view json = {};
};

// Text before the dims of each output, and the output's encoding; `names` are those of model and
// version.
class ResponseTemplate {
 public:
  ResponseTemplate(std::string names, std::vector<std::string> openings,
                   std::vector<OutputForm> forms)
      : names_(std::move(names)), openings_(std::move(openings)), forms_(std::move(forms)) {}

  [[nodiscard]] const std::vector<OutputForm>& forms() const { return forms_; }

 protected:
  std::string names_;
  std::vector<std::string> openings_;
  std::vector<OutputForm> forms_;
};

// The header of responses over HTTP, of members of JSON.
class JsonResponseTemplate : public ResponseTemplate {
 public:
  // `types`: of each output's elements, as far as they can be JSON.
  JsonResponseTemplate(ResponseTemplate common, std::vector<std::optional<ElementType>> types)
      : ResponseTemplate(std::move(common)), types_(std::move(types)) {}

  [[nodiscard]] const std::vector<std::optional<ElementType>>& types() const { return types_; }

  // Returns the header; `id` and the `parameters`, a JSON object, may be empty. There is one output
  // for each opening.
  [[nodiscard]] std::string encode(std::string_view id, std::string_view parameters,
                                   std::span<const ResponseOutput> outputs) const;

 private:
  std::vector<std::optional<ElementType>> types_;
};

// A member of the flat JSON object of a generate request's response: its name with a colon, and its
// text, the request's id, or the values of an output.
struct GeneratedMember {
  static constexpr int kText = -1;
  static constexpr int kId = -2;

  std::string name;
  int source = kText;  // Else the index of the output.
  std::string text = {};
  std::optional<ElementType> type = {};  // Of the output's elements.
};

// The flat JSON objects of responses with one signature.
class GeneratedTemplate {
 public:
  // `members`: in the order in which they are written.
  explicit GeneratedTemplate(std::vector<GeneratedMember> members) : members_(std::move(members)) {}

  [[nodiscard]] const std::vector<GeneratedMember>& members() const { return members_; }

  // Appends a response's object: the id, which may be empty, and the JSON values of each output.
  void append(std::string_view id, std::span<const std::string> outputs, std::string& json) const;

 private:
  std::vector<GeneratedMember> members_;
};

// A frame: its first bytes, and what comes before the bytes of each output. `nbytes` are those of
// its message, all of it.
struct ResponseFrame {
  std::string opening;
  std::vector<std::string> tags;
  std::uint64_t nbytes = 0;
};

// Protobuf fields around the outputs' bytes in responses over gRPC.
class MessageResponseTemplate : public ResponseTemplate {
 public:
  explicit MessageResponseTemplate(ResponseTemplate common) : ResponseTemplate(std::move(common)) {}

  // Returns the frame of a ModelInferResponse or, for a stream, of a ModelStreamInferResponse with
  // it. The `parameters` are encoded fields; so many bytes of others follow behind the outputs. One
  // of 2 GiB or more has no valid prefix.
  [[nodiscard]] ResponseFrame encode(std::string_view id, std::string_view parameters,
                                     std::span<const ResponseOutput> outputs, bool stream,
                                     std::uint64_t following) const;
};

}  // namespace gpubridge
