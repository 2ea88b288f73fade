// Values that a response puts into a template, taken from Python objects.
#pragma once

#include "memory/sent_buffers.h"
#include "python_object.h"
#include "request/response_templates.h"

namespace gpubridge {

// The outputs of one response, and the dims and texts that they refer to. Values are the buffers of
// outputs, and the JSON of those that are told so.
class ResponseOutputs {
 public:
  ResponseOutputs(nb::handle shapes, const SentBuffers& values,
                  const std::vector<OutputForm>& forms);

  [[nodiscard]] const std::vector<ResponseOutput>& all() const { return outputs_; }
  // Of all outputs whose bytes follow.
  [[nodiscard]] std::uint64_t nbytes() const { return nbytes_; }

 private:
  std::vector<std::int64_t> dims_;
  std::vector<nb::object> texts_;
  std::vector<ResponseOutput> outputs_;
  std::uint64_t nbytes_ = 0;
};

// What a response has for each output (JSON text, or a buffer), and the buffers that follow its
// header.
struct SentValues {
  nb::object all;
  nb::object following;
};

// Formats the outputs that are to be JSON. Nothing where that is a worker's, or cannot be done.
std::optional<SentValues> sent_values(const JsonResponseTemplate& response, nb::handle shapes,
                                      nb::handle buffers);

// Appends the JSON of a response to a generate request. False, with the text as it was, where that
// is a worker's, or cannot be done.
[[nodiscard]] bool append_generated(const GeneratedTemplate& response, std::string_view id,
                                    nb::handle shapes, nb::handle buffers, std::string& json);

// A frame in pieces, the last of which are the fields `following`, or how many bytes its message
// has, where those are too many for one.
struct EncodedFrame {
  std::vector<nb::object> pieces;
  std::uint64_t nbytes = 0;
};
EncodedFrame encode_frame(const MessageResponseTemplate& response, std::string_view id,
                          std::string_view parameters, nb::handle shapes, nb::handle buffers,
                          bool stream, nb::handle following);

}  // namespace gpubridge
