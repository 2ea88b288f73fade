// Memory that is handed from stub to stub, as Python describes it: the MemoryRange of
// gpubridge/request.py, and the ids by which stubs know the regions.
#pragma once

#include "ipc/records.h"
#include "lazy_sequence.h"
#include "python_object.h"

namespace gpubridge {

// As gpubridge/transport/leases.py and device_events.py have them.
inline constexpr std::uint64_t kReadOnlyRegion = 1U << 30U;
inline constexpr std::uint64_t kArenaRegion = 1U << 31U;

nb::object make_range(nb::handle segment, std::uint64_t offset, std::uint64_t nbytes,
                      nb::handle keep);
// The MemoryRange of a tensor without bytes.
nb::object empty_range();

// What a MemoryRange says. That of a tensor without bytes has no segment.
struct RangeItem {
  static constexpr const char* kTypeName = "gpubridge._native.MemoryRanges";

  nb::object segment = nb::none();
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  nb::object keep = nb::none();

  [[nodiscard]] nb::object object() const {
    return segment.is_none() ? empty_range() : make_range(segment, offset, nbytes, keep);
  }
};

// The ranges of a call's tensors. Those of other requests are in a list.
using MemoryRanges = LazySequence<RangeItem>;

// A MemoryRange, for as long as that lives.
struct RangeView {
  explicit RangeView(nb::handle range);
  explicit RangeView(const RangeItem& item)
      : segment(item.segment), offset(item.offset), nbytes(item.nbytes), keep(item.keep) {}

  nb::handle segment;
  std::uint64_t offset;
  std::uint64_t nbytes;
  nb::handle keep;
};

// Calls `look` with the RangeView of each range until it returns true; returns whether it has.
template <typename Look>
bool any_range(nb::handle ranges, Look&& look) {
  if (const auto* items = MemoryRanges::of(ranges)) {
    return std::any_of(items->begin(), items->end(),
                       [&](const RangeItem& item) { return look(RangeView(item)); });
  }
  for (nb::handle range : ranges) {
    if (look(RangeView(range))) return true;
  }
  return false;
}

// Finds where the tensors of a stub lie. Those of one record mostly are in one region.
class StubRanges {
 public:
  // `memory` is the BorrowedMemory of the stub, which lives on.
  explicit StubRanges(nb::handle memory) : memory_(memory) {}

  // `keep` holds the bytes.
  RangeItem of(const TensorRef& ref, nb::handle keep);

 private:
  nb::handle memory_;
  std::uint64_t region_ = 0;
  nb::object segment_;  // of that region
};

// True if all of the ranges lie in memory of the server or of stubs that the host can read.
[[nodiscard]] bool are_on_host(nb::handle ranges);

// True if some of the ranges lie in host memory that is meant for another model.
[[nodiscard]] bool for_others(nb::handle ranges, nb::handle model);

// The ids by which references to a stub name regions; each is announced to it before.
class RegionNames {
 public:
  // Of a RegionAnnouncer (gpubridge/engine/memory/region_announcer.py).
  explicit RegionNames(nb::object announcer)
      : announcer_(std::move(announcer)), known_(announcer_.attr("known")) {}

  [[nodiscard]] std::uint64_t of(nb::handle segment, bool read_only) const;
  // Writes references to ranges, under a lease that nothing has where there are no bytes; returns
  // their end.
  char* write(char* at, nb::handle ranges, std::uint32_t lease, bool read_only) const;

 private:
  nb::object announcer_;
  nb::object known_;  // a set
};

}  // namespace gpubridge
