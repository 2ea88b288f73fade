// Views of borrowed memory, whose end ends their lease.
#pragma once

#include "lazy_sequence.h"
#include "python_object.h"
#include "stub/tensor.h"

namespace gpubridge {

struct LeaseTable;
struct LentRegion;

// Bytes that something keeps where they are, mostly a loan; none without that.
struct LentSpan {
  static constexpr const char* kTypeName = "gpubridge._native.LentBuffers";

  std::shared_ptr<const void> keep;
  char* data = nullptr;
  std::size_t size = 0;
  bool read_only = false;

  // A memoryview of them.
  [[nodiscard]] nb::object object() const;
};

using LentBuffers = LazySequence<LentSpan>;

// The borrower's book of leases: which views exist under each, so that a lease ends with the last.
class LeaseBook {
 public:
  // `table` has a byte for each lease; it is cleared when the lease ends.
  explicit LeaseBook(nb::handle table);

  void add(std::uint64_t region, nb::handle buffer);
  void remove(std::uint64_t region) { regions_.erase(region); }
  // Writes to another table from now on.
  void forget(nb::handle table);

  [[nodiscard]] std::size_t held() const;
  [[nodiscard]] std::size_t held_bytes() const;

  // True if a place is in a known region, under a lease that exists.
  [[nodiscard]] bool exists(const TensorRef& place) const;

  // Where the bytes of a place are in this process; null where it does not exist.
  [[nodiscard]] const char* address(const TensorRef& place) const;
  // The bytes at places; throws ValueError where one does not exist.
  std::vector<LentSpan> spans(std::span<const TensorRef> places);
  // The exporter of each of them.
  std::vector<nb::object> lend(std::span<const TensorRef> places, bool read_only);
  nb::object views(nb::handle refs);
  nb::object tensors(nb::handle refs, nb::handle specs, nb::handle shapes, nb::handle kind,
                     bool placed, bool read_only);

 private:
  [[nodiscard]] const std::shared_ptr<LentRegion>* region_of(const TensorRef& place) const;

  std::shared_ptr<LeaseTable> table_;
  std::unordered_map<std::uint64_t, std::shared_ptr<LentRegion>> regions_;
};

}  // namespace gpubridge
