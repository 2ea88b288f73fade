// Memory that is handed from stub to stub, as Python describes it: the MemoryRange of
// gpubridge/request.py, and the ids by which stubs know the regions.
#pragma once

#include "ipc/records.h"
#include "python_object.h"

namespace gpubridge {

// As gpubridge/transport/leases.py and device_events.py have them.
inline constexpr std::uint64_t kReadOnlyRegion = 1U << 30U;
inline constexpr std::uint64_t kArenaRegion = 1U << 31U;

// A MemoryRange, for as long as that lives.
struct RangeView {
  explicit RangeView(nb::handle range);

  nb::handle segment;
  std::uint64_t offset;
  std::uint64_t nbytes;
  nb::handle keep;
};

nb::object make_range(nb::handle segment, std::uint64_t offset, std::uint64_t nbytes,
                      nb::handle keep);
// The MemoryRange of a tensor without bytes.
nb::object empty_range();

// Where a stub's tensor lies in `memory` (BorrowedMemory), which `keep` holds.
nb::object stub_range(nb::handle memory, const TensorRef& ref, nb::handle keep);

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
