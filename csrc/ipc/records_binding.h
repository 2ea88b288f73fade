// Records as Python sees them: gpubridge/transport/records.py says what the parts mean.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ipc/records.h"
#include "lazy_sequence.h"
#include "text.h"

namespace gpubridge {

// A reference as Python sees it: (region, offset, nbytes, lease).
struct TensorRefItem : TensorRef {
  static constexpr const char* kTypeName = "gpubridge._native.TensorRefs";

  [[nodiscard]] nanobind::object object() const {
    return nanobind::make_tuple(region, offset, nbytes, lease);
  }
};

using TensorRefs = LazySequence<TensorRefItem>;

// Takes records apart; what signatures and short contexts say is remembered, and the shapes that
// came with each signature last.
class RecordReader {
 public:
  // What a record's signature and dims say.
  struct Tensors {
    const std::vector<TensorKind>& kinds;
    nanobind::object signature;
    nanobind::object shapes;
  };

  // `parse_signature` gives the Signature that bytes are, `codec` is the ContextCodec of the
  // records' contexts; `record` is the tuple type of the results.
  RecordReader(nanobind::object parse_signature, nanobind::object codec,
               nanobind::type_object record);

  // Returns the records at `at` in a message, and where they end.
  nanobind::tuple read(const nanobind::bytes& message, std::size_t at, std::size_t count,
                       bool named);
  nanobind::object record(const RecordView& view);
  // The kinds are those of the reader, until it reads the next record. Throws MalformedRecord where
  // the dims are not those of the signature.
  Tensors tensors(const RecordView& view);
  // The TensorRefs of a record.
  static nanobind::object refs(const RecordView& view);

 private:
  struct KnownSignature {
    nanobind::object signature;
    std::vector<TensorKind> kinds;
    std::string dims;
    nanobind::object shapes;
  };

  KnownSignature& signature(std::string_view raw);
  nanobind::object context(std::string_view raw);
  static nanobind::object shapes(const RecordView& view, KnownSignature& known);

  nanobind::object parse_signature_;
  nanobind::object codec_;
  nanobind::type_object record_;
  newfunc new_tuple_;
  std::unordered_map<std::string, KnownSignature, TextHash, std::equal_to<>> known_;
  std::unordered_map<std::string, nanobind::object, TextHash, std::equal_to<>> contexts_;
};

}  // namespace gpubridge
