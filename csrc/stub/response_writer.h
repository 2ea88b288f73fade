// Records of responses: their tensors placed, their signatures known by names and datatypes.
#pragma once

#include <unordered_set>

#include "ipc/context.h"
#include "memory/lease_book.h"
#include "python_object.h"
#include "stub/output_pool.h"

namespace gpubridge::stub {

// The large inputs of a request whose memory is its alone.
class OwnInputs {
 public:
  OwnInputs() = default;
  // Of inputs of at least so many bytes. The memory of the record's tensors exists.
  OwnInputs(const RecordView& record, const Context& context, const LeaseBook& book,
            std::uint64_t least);

  // Where bytes lie in one of them.
  [[nodiscard]] std::optional<TensorRef> find(const char* data, std::size_t size) const;
  [[nodiscard]] bool empty() const { return inputs_.empty(); }

 private:
  struct Input {
    const char* begin;
    // The furthest end of all that begin up to there: inputs may overlap.
    const char* end;
    TensorRef ref;
  };

  std::uint64_t least_ = 0;
  std::vector<Input> inputs_;
};

// Where a response goes. `wanted` holds the names of the outputs that are sent; `consumer` is whose
// processes take them, empty for the server. An output may stay in one of the `inputs`, whose lease
// has the byte `lent`; in none where there are none.
struct ResponseTarget {
  std::uint32_t ticket = 0;
  std::uint32_t flags = 0;
  nb::handle wanted;
  std::string_view consumer;
  const OwnInputs* inputs = nullptr;
  const unsigned char* lent = nullptr;
};

// Writes responses of plain tensors in host memory; everything else is left to Python. Any thread
// that has the interpreter's lock may, also while another one has let go of it in here.
class ResponseWriter {
 public:
  // `check` is an OutputCheck, which makes signatures and hears of outputs that are not sent.
  ResponseWriter(nb::object check, nb::type_object tensor, OutputPool& pool);

  // Appends the record of a response to `out` and counts what it copied; false where it is none
  // that is written here. Lets go of the response, and of what its memory is for, where outputs
  // stay in inputs, even if it throws then.
  bool write(const ResponseTarget& target, nb::object& response, std::string& out,
             std::uint64_t& copied);

  // Appends a record without tensors, with flags.
  void write_nothing(std::uint32_t ticket, std::uint32_t flags, std::string& out);

 private:
  struct Output;
  // An output without a reference to it, and where it lies; of one that is copied only the size.
  struct Sent {
    std::size_t index;
    const char* data;
    TensorRef place;
  };

  bool gather(PyObject* response, nb::handle wanted, std::vector<Output>& outputs);
  static std::vector<Sent> passed_on(const std::vector<Output>& outputs,
                                     const ResponseTarget& target);
  static std::vector<Sent> others(const std::vector<Output>& outputs, std::span<const Sent> stay);
  bool copy(std::span<const Sent> outputs, std::string_view consumer, std::span<TensorRef> refs,
            std::uint64_t& copied);
  bool pass_on(const ResponseTarget& target, std::span<const Sent> stay, std::span<TensorRef> refs,
               std::uint64_t& copied);
  std::string signature(const std::vector<Output>& outputs, const SignatureKey& key,
                        nb::handle wanted);

  nb::object check_;
  nb::type_object tensor_;
  OutputPool& pool_;
  std::unordered_map<std::string, std::string> signatures_;
  std::unordered_set<std::string> dropped_;
  std::string nothing_;
};

}  // namespace gpubridge::stub
