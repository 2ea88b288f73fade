// Records as Python sees them: gpubridge/transport/records.py says what the parts mean.
#pragma once

#include "ipc/records.h"
#include "lazy_sequence.h"
#include "python_object.h"
#include "text.h"

namespace gpubridge {

// A reference as Python sees it: (region, offset, nbytes, lease).
struct TensorRefItem : TensorRef {
  static constexpr const char* kTypeName = "gpubridge._native.TensorRefs";

  [[nodiscard]] nb::object object() const { return nb::make_tuple(region, offset, nbytes, lease); }
};

using TensorRefs = LazySequence<TensorRefItem>;

// The reference whose fields begin at an index of a sequence.
inline TensorRef ref_at(nb::handle fields, std::size_t index = 0) {
  const auto field = [&](std::size_t number) { return nb::object(fields[index + number]); };
  return {nb::cast<std::uint64_t>(field(0)), nb::cast<std::uint64_t>(field(1)),
          nb::cast<std::uint64_t>(field(2)), nb::cast<std::uint32_t>(field(3))};
}

// Values that records of one signature share, and the shapes that came with it last.
struct RecordForm {
  nb::object signature;
  nb::object wanted;  // names of the outputs that are sent: a set, or what holds names
  std::vector<TensorKind> kinds;
  std::string dims;
  nb::object shapes;
};

// The forms of records, which are remembered.
class RecordForms {
 public:
  // `parse_signature` gives the Signature that bytes are; `outputs` holds the names of the outputs
  // that are sent for a record which names none.
  RecordForms(nb::object parse_signature, nb::object outputs)
      : parse_signature_(std::move(parse_signature)), outputs_(std::move(outputs)) {}

  // The form of a record, until that of the next is asked for; throws MalformedRecord where the
  // dims are not those of the signature.
  RecordForm& of(const RecordView& view);

 private:
  nb::object parse_signature_;
  nb::object outputs_;
  std::unordered_map<std::string, RecordForm, TextHash, std::equal_to<>> known_;
};

// Takes records apart.
class RecordReader {
 public:
  // `parse_signature` gives the Signature that bytes are, `codec` is the ContextCodec of the
  // records' contexts; `record` is the tuple type of the results.
  RecordReader(nb::object parse_signature, nb::object codec, nb::type_object record);

  // Returns the records at `at` in a message, and where they end.
  nb::tuple read(const nb::bytes& message, std::size_t at, std::size_t count, bool named);
  nb::object record(const RecordView& view);
  RecordForm& form(const RecordView& view) { return forms_.of(view); }
  // The TensorRefs of a record.
  static nb::object refs(const RecordView& view);

 private:
  RecordForms forms_;
  nb::object codec_;
  nb::type_object record_;
};

}  // namespace gpubridge
