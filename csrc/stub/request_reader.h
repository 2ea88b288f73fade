// Requests for the model from the records of an EXECUTE message.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ipc/records.h"
#include "memory/lease_book.h"

namespace gpubridge::stub {

// What requests of one signature have in common, and the shapes that came with it last.
struct RequestForm {
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
  nanobind::object outputs;  // frozenset of the names in the configuration
};

// Makes requests of records whose context says at most that others look at the inputs, too, in
// memory that the server has lent.
class RequestReader {
 public:
  // `parse_signature` gives the Signature that bytes are; `make_origin` is that of `Arrival`.
  RequestReader(nanobind::object parse_signature, nanobind::object make_origin, ModelWords model,
                nanobind::type_object request, nanobind::type_object tensor, LeaseBook& book);

  // The form of a record; throws MalformedRecord or a Python error where it has none.
  RequestForm& form(const RecordView& record);

  // Says whether a request is of memory that is there, with nothing said of it but where it is, and
  // whether others look at it.
  [[nodiscard]] bool is_plain(const RecordView& record) const;

  // Makes a request of a plain record; its inputs are read-only where others look at them.
  nanobind::object request(const RecordView& record, RequestForm& form, nanobind::handle arrival);

  [[nodiscard]] nanobind::object arrival(nanobind::handle message, std::size_t at) const;

 private:
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>{}(text);
    }
  };

  void take_shapes(const RecordView& record, RequestForm& form) const;

  nanobind::object parse_signature_;
  nanobind::object make_origin_;
  ModelWords model_;
  nanobind::type_object request_;
  nanobind::type_object tensor_;
  LeaseBook& book_;
  std::vector<Place> places_;
  std::unordered_map<std::string, RequestForm, TextHash, std::equal_to<>> known_;
};

}  // namespace gpubridge::stub
