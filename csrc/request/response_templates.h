// Templates of responses: what all responses with the same outputs have in common, filled with
// dims, sizes and the id of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gpubridge {

// How an output is told: by its bytes behind the header or message, as JSON values in the header,
// or not at all, since it lies in memory that the client registered.
enum class OutputForm : std::uint8_t { kElsewhere = 0, kBinary = 1, kJson = 2 };

// One output of a response. `nbytes` counts its bytes; `json` are its values.
struct ResponseOutput {
  std::span<const std::int64_t> dims;
  std::uint64_t nbytes = 0;
  std::string_view json = {};
};

// Appends a text as JSON, with its quotation marks; the text is UTF-8.
void append_json_text(std::string& json, std::string_view text);

// The header of responses over HTTP.
class JsonResponseTemplate {
 public:
  // `names` are the members with the names of model and version, `openings` what comes before the
  // dims of each output.
  JsonResponseTemplate(std::string names, std::vector<std::string> openings,
                       std::vector<OutputForm> forms);

  [[nodiscard]] const std::vector<OutputForm>& forms() const { return forms_; }

  // Returns the header; `id` and the `parameters`, a JSON object, may be empty. There is one output
  // for each opening.
  [[nodiscard]] std::string encode(std::string_view id, std::string_view parameters,
                                   std::span<const ResponseOutput> outputs) const;

 private:
  std::string names_;
  std::vector<std::string> openings_;
  std::vector<OutputForm> forms_;
};

// What surrounds the outputs' bytes in responses over gRPC.
class MessageResponseTemplate {
 public:
  // `names` are the fields with the names of model and version, `openings` the fields of each
  // output before its shape.
  MessageResponseTemplate(std::string names, std::vector<std::string> openings,
                          std::vector<OutputForm> forms);

  [[nodiscard]] const std::vector<OutputForm>& forms() const { return forms_; }

  // A frame: its first bytes, and what comes before the bytes of each output. `nbytes` are those of
  // its message, all of it.
  struct Frame {
    std::string opening;
    std::vector<std::string> tags;
    std::uint64_t nbytes = 0;
  };

  // Returns the frame of a ModelInferResponse or, for a stream, of a ModelStreamInferResponse with
  // it. The `parameters` are encoded fields; so many bytes of others follow behind the outputs. One
  // of 2 GiB or more has no valid prefix.
  [[nodiscard]] Frame encode(std::string_view id, std::string_view parameters,
                             std::span<const ResponseOutput> outputs, bool stream,
                             std::uint64_t following) const;

 private:
  std::string names_;
  std::vector<std::string> openings_;
  std::vector<OutputForm> forms_;
};

}  // namespace gpubridge
