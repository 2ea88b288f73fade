// The cells of a stub's control page that the server and the stub tell each other things by; what
// they are for is described in gpubridge/transport/control.py.
#pragma once

#include "std.h"

namespace gpubridge {

// Cells of one control page, which must stay mapped. Each has one writer at a time: the lender sets
// a lease's byte before it sends the message that names it, the borrower clears it when its last
// view is gone.
struct ControlCells {
  std::span<std::uint8_t> lent;
  std::span<std::uint8_t> cancelled;
  std::span<std::uint32_t> passed_on;
  std::span<std::uint32_t> received;
  // The number of the batch that was started last, and when that was.
  std::span<const std::uint64_t> progress;
  // Up to which batch the stub has begun, or the server has withdrawn.
  std::span<std::uint64_t> claimed;
};

// Of that cell: the stub claims each batch before it begins it, so that others can be withdrawn.
inline constexpr std::uint64_t kClaims = std::uint64_t{1} << 63U;

// Claims all batches up to one; returns the number of the last that was claimed before, or none
// where this one was. Both sides do so: a batch is the stub's or the server's, never both's.
[[nodiscard]] inline std::optional<std::uint64_t> claim(std::uint64_t& cell,
                                                        std::uint64_t sequence) {
  std::uint64_t claimed = __atomic_load_n(&cell, __ATOMIC_ACQUIRE);
  do {
    if ((claimed & ~kClaims) >= sequence) return std::nullopt;
  } while (!__atomic_compare_exchange_n(&cell, &claimed, kClaims | sequence, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return claimed & ~kClaims;
}

template <typename Cell>
Cell load_cell(const Cell& cell) {
  return __atomic_load_n(&cell, __ATOMIC_ACQUIRE);
}

template <typename Cell>
void store_cell(Cell& cell, Cell value) {
  __atomic_store_n(&cell, value, __ATOMIC_RELEASE);
}

}  // namespace gpubridge
