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

// Takes records apart; what signatures and short contexts say is remembered, and the shapes that
// came with each signature last.
class RecordReader {
 public:
  // What a record's signature and dims say.
  struct Tensors {
    const std::vector<TensorKind>& kinds;
    nb::object signature;
    nb::object shapes;
  };

  // `parse_signature` gives the Signature that bytes are, `codec` is the ContextCodec of the
  // records' contexts; `record` is the tuple type of the results.
  RecordReader(nb::object parse_signature, nb::object codec, nb::type_object record);

  // Returns the records at `at` in a message, and where they end.
  nb::tuple read(const nb::bytes& message, std::size_t at, std::size_t count, bool named);
  nb::object record(const RecordView& view);
  // The kinds are those of the reader, until it reads the next record. Throws MalformedRecord where
  // the dims are not those of the signature.
  Tensors tensors(const RecordView& view);
  // The TensorRefs of a record.
  static nb::object refs(const RecordView& view);

 private:
  struct KnownSignature {
    nb::object signature;
    std::vector<TensorKind> kinds;
    std::string dims;
    nb::object shapes;
  };

  KnownSignature& signature(std::string_view raw);
  nb::object context(std::string_view raw);
  static nb::object shapes(const RecordView& view, KnownSignature& known);

  nb::object parse_signature_;
  nb::object codec_;
  nb::type_object record_;
  newfunc new_tuple_;
  std::unordered_map<std::string, KnownSignature, TextHash, std::equal_to<>> known_;
  std::unordered_map<std::string, nb::object, TextHash, std::equal_to<>> contexts_;
};

}  // namespace gpubridge
