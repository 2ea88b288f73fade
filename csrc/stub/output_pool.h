// Slots of output memory for responses, each with a lease of its own, used again and again.
#pragma once

#include "buffer_view.h"
#include "ipc/records.h"
#include "python_object.h"

namespace gpubridge::stub {

// Takes slots from the stub's `OutputMemory` (Python), which they go back to when they are idle for
// long or memory is short. A slot is free when the server has cleared its lease's byte.
class OutputPool {
 public:
  // `memory` is the OutputMemory, `table` the bytes of its leases.
  OutputPool(nb::object memory, nb::handle table);

  struct Slot {
    char* data;
    TensorRef place;  // with the slot's size as nbytes
  };

  // The largest response that has a place here.
  static constexpr std::size_t kMostBytes = std::size_t{1} << 24U;
  // Slots of more have sizes in quarter steps between powers of two.
  static constexpr std::size_t kLarge = std::size_t{1} << 16U;

  // A slot of at least so many bytes, lent to the server from now on; none where the pool is at its
  // limit and all its slots are in use. It lies in memory for the processes of a model, or for the
  // server alone where the name is empty. Throws what the OutputMemory raises.
  std::optional<Slot> lend(std::size_t nbytes, std::string_view consumer);

  // Takes slots back that were lent, and are not sent.
  void take_back(std::span<const TensorRef> places) {
    for (const TensorRef& place : places) {
      if (place.nbytes != 0) __atomic_store_n(lease(place), 0, __ATOMIC_RELEASE);
    }
  }
  // True if models have got slots to write to: then outputs may lie in one.
  [[nodiscard]] bool shown() const { return nb::cast<bool>(memory_.attr("exposed")); }

  // Gives all free slots back.
  void give_back();
  // Writes to no lease byte any more: for a forked child.
  void disown() { classes_.clear(); }

 private:
  struct Entry {
    nb::object slot;
    std::unique_ptr<BufferView> memory;
    TensorRef place;
  };
  using Class = std::deque<Entry>;

  [[nodiscard]] unsigned char* lease(const TensorRef& place) const {
    return static_cast<unsigned char*>(table_->data()) + place.lease;
  }
  [[nodiscard]] bool is_free(const Entry& entry) const {
    return __atomic_load_n(lease(entry.place), __ATOMIC_ACQUIRE) == 0;
  }
  Slot take(Entry& entry) {
    __atomic_store_n(lease(entry.place), 1, __ATOMIC_RELEASE);
    return {static_cast<char*>(entry.memory->data()), entry.place};
  }
  std::optional<Slot> grow(Class& entries, std::size_t nbytes, std::string_view consumer);

  nb::object memory_;
  std::unique_ptr<BufferView> table_;
  // By consumer: a class for each size of slots.
  std::map<std::string, std::array<Class, 37>, std::less<>> classes_;
};

}  // namespace gpubridge::stub
