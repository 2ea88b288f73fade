// Requests for the model from the records of an EXECUTE message.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ipc/context.h"
#include "ipc/records.h"
#include "memory/lease_book.h"
#include "stub/request.h"
#include "text.h"

namespace gpubridge::stub {

// What records of one signature have in common, and the shapes that came with it last.
struct RecordForm {
  std::vector<TensorKind> kinds;
  std::vector<nanobind::object> names;
  std::vector<nanobind::object> datatypes;
  nanobind::object wanted;  // names of the outputs that are sent: a set, or what holds names
  std::string dims;
  std::vector<nanobind::object> shapes;
};

// What the requests of one model have in common.
struct ModelWords {
  nanobind::object name;
  nanobind::object version;
};

// Makes tensors of records, in memory that the server has lent.
class TensorReader {
 public:
  // `parse_signature` gives the Signature that bytes are; `outputs` holds the names of the outputs
  // that are sent for a request which names none.
  TensorReader(nanobind::object parse_signature, nanobind::object outputs,
               nanobind::type_object tensor, LeaseBook& book);

  // The form of a record; throws MalformedRecord or a Python error where it has none.
  RecordForm& form(const RecordView& record);

  // Says whether the memory of all tensors is there.
  [[nodiscard]] bool exists(const RecordView& record) const;

  // A list of the tensors of a record whose memory is there.
  nanobind::object tensors(const RecordView& record, const RecordForm& form, bool read_only);

 protected:
  nanobind::type_object tensor_;

 private:
  void take_shapes(const RecordView& record, RecordForm& form) const;

  nanobind::object parse_signature_;
  nanobind::object outputs_;
  LeaseBook& book_;
  std::vector<Place> places_;
  std::unordered_map<std::string, RecordForm, TextHash, std::equal_to<>> known_;
};

// What a reader of requests needs of Python.
struct ReaderParts {
  nanobind::object make_origin;    // that of an Arrival
  nanobind::object make_controls;  // gives the control inputs that the text of a context says
  nanobind::object make_trace;     // gives the InferenceTrace of a number
};

// Makes requests in memory that the server has lent.
class RequestReader : public TensorReader {
 public:
  RequestReader(TensorReader reader, ReaderParts parts, ModelWords model,
                nanobind::type_object request);

  // What is said of a request besides its tensors; throws MalformedContext.
  static Context context(const RecordView& record);

  // Says whether a request is of memory that is there, and nothing is said of it that only Python
  // knows.
  [[nodiscard]] bool is_plain(const RecordView& record, const Context& context) const;

  // Makes a request of a plain record; its inputs are read-only where others look at them.
  nanobind::object request(const RecordView& record, const RecordForm& form,
                           nanobind::handle arrival);

  [[nodiscard]] nanobind::object arrival(nanobind::handle message, std::size_t at) const;

 private:
  // A control input of a sequence, whose bytes each request gets for its own.
  struct Control {
    nanobind::object name;
    nanobind::object datatype;
    nanobind::object shape;
    nanobind::object bytes;
  };

  void take_context(const Context& context, Received& received) const;
  void add_controls(std::string_view told, nanobind::handle inputs);

  ReaderParts parts_;
  ModelWords model_;
  nanobind::type_object request_;
  std::unordered_map<std::string, std::vector<Control>, TextHash, std::equal_to<>> controls_;
};

}  // namespace gpubridge::stub
