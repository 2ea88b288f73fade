// The cells of a stub's control page that the server and the stub tell each other things by; what
// they are for is described in gpubridge/transport/control.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gpubridge {

// Cells of one control page, which must stay mapped. Each has one writer at a time: the lender sets
// a lease's byte before it sends the message that names it, the borrower clears it when its last
// view is gone.
struct ControlCells {
  std::span<std::uint8_t> lent;
  std::span<std::uint8_t> cancelled;
  std::span<std::uint32_t> passed_on;
  // The number of the batch that was started last, and when that was.
  std::span<const std::uint64_t> progress;
};

template <typename Cell>
Cell load_cell(const Cell& cell) {
  return __atomic_load_n(&cell, __ATOMIC_ACQUIRE);
}

template <typename Cell>
void store_cell(Cell& cell, Cell value) {
  __atomic_store_n(&cell, value, __ATOMIC_RELEASE);
}

}  // namespace gpubridge
