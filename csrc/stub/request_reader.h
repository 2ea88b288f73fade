// Requests for the model from the records of an EXECUTE message.
#pragma once

#include "ipc/context.h"
#include "ipc/records.h"
#include "ipc/records_binding.h"
#include "memory/lease_book.h"
#include "python_object.h"
#include "stub/request.h"
#include "text.h"

namespace gpubridge::stub {

// Values that the requests of one model share.
struct ModelWords {
  nb::object name;
  nb::object version;
};

// Makes tensors of records, in memory that the server has lent.
class TensorReader {
 public:
  // `parse_signature` gives the Signature that bytes are; `outputs` holds the names of the outputs
  // that are sent for a request which names none.
  TensorReader(nb::object parse_signature, nb::object outputs, nb::type_object tensor,
               LeaseBook& book);

  // The form of a record; throws MalformedRecord or a Python error where it has none.
  RecordForm& form(const RecordView& record) { return forms_.of(record); }

  // True if the memory of all tensors is there.
  [[nodiscard]] bool exists(const RecordView& record) const;

  // A list of the tensors of a record whose memory is there.
  nb::object tensors(const RecordView& record, const RecordForm& form, bool read_only);

 protected:
  nb::type_object tensor_;

 private:
  RecordForms forms_;
  LeaseBook& book_;
  std::vector<TensorRef> places_;
};

// Python objects that a reader of requests needs.
struct ReaderParts {
  nb::object make_origin;    // that of an Arrival
  nb::object make_controls;  // gives the control inputs that the text of a context says
  nb::object make_trace;     // gives the InferenceTrace of a number and a context
};

// Makes requests in memory that the server has lent.
class RequestReader : public TensorReader {
 public:
  RequestReader(TensorReader reader, ReaderParts parts, ModelWords model, nb::type_object request);

  // The context of a request; throws MalformedContext.
  static Context context(const RecordView& record);

  // True if a request is of memory that is there, and nothing is said of it that only Python
  // knows.
  [[nodiscard]] bool is_plain(const RecordView& record, const Context& context) const;

  // Makes a request of a plain record; its inputs are read-only where others look at them.
  nb::object request(const RecordView& record, const RecordForm& form, nb::handle arrival);

  [[nodiscard]] nb::object arrival(nb::handle message, std::size_t at) const {
    return arrival_object({nb::borrow(message), at, parts_.make_origin});
  }

 private:
  // A control input of a sequence, whose bytes each request gets for its own.
  struct Control {
    nb::object name;
    nb::object datatype;
    nb::object shape;
    nb::object bytes;
  };

  void take_context(const Context& context, Received& received) const;
  void add_controls(std::string_view text, nb::handle inputs);

  ReaderParts parts_;
  ModelWords model_;
  nb::type_object request_;
  std::unordered_map<std::string, std::vector<Control>, TextHash, std::equal_to<>> controls_;
};

}  // namespace gpubridge::stub
