// Outputs that lie in an input of their request: gpubridge/stub/passing_on.py has the same in
// Python, and says when that is safe.
#pragma once

#include "ipc/context.h"
#include "ipc/records.h"
#include "memory/lease_book.h"
#include "std.h"

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

// True if two of the things, whose places `place` returns, share a byte: who gets the one may write
// to the other.
template <typename Thing>
bool overlap(std::vector<Thing> things, TensorRef Thing::* place) {
  const auto order = [place](const Thing& thing) {
    return std::pair((thing.*place).region, (thing.*place).offset);
  };
  std::ranges::sort(things, {}, order);
  const auto shared = [](const TensorRef& one, const TensorRef& other) {
    return one.region == other.region && one.offset + one.nbytes > other.offset;
  };
  return std::ranges::adjacent_find(things, shared, place) != things.end();
}

}  // namespace gpubridge::stub
