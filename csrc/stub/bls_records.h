// Records of a model's calls of other models, and of the responses to them.
#pragma once

#include "python_object.h"
#include "stub/request_reader.h"
#include "stub/tensor.h"

namespace gpubridge::stub {

// Encodes calls that say no more than which model they are for and which outputs are wanted.
class CallWriter {
 public:
  // `describe` gives the signature and the context of a call; `references` says where tensors lie
  // that are in no shared memory yet, for a model, as the fields of all references one after
  // another.
  CallWriter(nb::object describe, nb::object references, nb::type_object tensor);

  // The record of a call; None where it is left to Python.
  nb::object write(std::uint32_t number, nb::handle request, bool decoupled);

 private:
  struct Known {
    std::string signature;
    std::string context;
  };

  struct Call {
    SignatureKey key;
    bool placed = true;      // whether all tensors are in shared memory
    bool handed_on = false;  // whether some are
  };

  bool read(nb::handle request, Call& call);
  void describe(nb::handle request, bool decoupled, Call& call, RecordParts& parts);
  const Known& known(nb::handle request, bool decoupled, Call& call);

  nb::object describe_;
  nb::object references_;
  nb::type_object tensor_;
  std::unordered_map<std::string, Known> known_;
};

// Makes responses of the records of a CALL_RESPONSES message.
class CallResponseReader {
 public:
  // `fall_back` makes a response of a record out of the ordinary, which begins at some place of a
  // message.
  CallResponseReader(TensorReader reader, nb::type_object response, nb::object fall_back)
      : reader_(std::move(reader)),
        response_(std::move(response)),
        fall_back_(std::move(fall_back)) {}

  // A list of (number of the call, flags, response or None). Throws MalformedRecord.
  nb::list read(const nb::bytes& message);

 private:
  nb::object response(const nb::bytes& message, const RecordView& record, std::size_t at);

  TensorReader reader_;
  nb::type_object response_;
  nb::object fall_back_;
};

// Adds the classes CallWriter and CallResponseReader to the module.
void bind_bls_records(nb::module_& module);

}  // namespace gpubridge::stub
