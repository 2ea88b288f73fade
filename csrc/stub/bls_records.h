// Responses to a model's calls of other models, from the records of a CALL_RESPONSES message.
#pragma once

#include "python_object.h"
#include "stub/request_reader.h"

namespace gpubridge::stub {

// What came for a call: `response` is None for an empty one.
struct CallResponse {
  std::uint32_t number;
  std::uint32_t flags;
  nb::object response;
};

class CallResponseReader {
 public:
  // `fall_back` makes a response of a record out of the ordinary, which begins at some place of a
  // message.
  CallResponseReader(TensorReader reader, nb::type_object response, nb::object fall_back)
      : reader_(std::move(reader)),
        response_(std::move(response)),
        fall_back_(std::move(fall_back)) {}

  std::vector<CallResponse> responses(const nb::bytes& message);

 private:
  nb::object response(const nb::bytes& message, const RecordView& record, std::size_t at);

  TensorReader reader_;
  nb::type_object response_;
  nb::object fall_back_;
};

}  // namespace gpubridge::stub
