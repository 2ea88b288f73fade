
#include "clock.h"
#include "python_object.h"

namespace gpubridge {
namespace {

// Slots of up to so many bytes have sizes that are powers of two.
constexpr std::uint64_t kSmallest = 4096;
constexpr std::uint64_t kLargest = std::uint64_t{1} << 16U;
constexpr std::size_t kSizes = 5;

// The small slots of an arena (gpubridge/host_shm/request_arena.py, whose base this is): lent and
// taken back without Python code while there are free ones. All else is the arena's.
class SlotLists {
 public:
  // The lists of free slots by size, and what has to be empty for slots to go back to them.
  SlotLists(nb::dict stacks, nb::list retired)
      : stacks_(std::move(stacks)), retired_(std::move(retired)) {
    for (std::size_t i = 0; i < kSizes; ++i) sizes_[i] = nb::int_(kSmallest << i);
  }

  nb::object allocate(std::uint64_t nbytes) const {
    if (nbytes <= kLargest) {
      if (nb::object slot = pop(nbytes); slot.is_valid()) return slot;
    }
    return attribute<"allocate_new">(nb::find(*this))(nbytes);
  }

  void free(nb::handle slot) const {
    if (!attribute<"body">(slot).is_none() || nb::len(retired_) != 0) {
      attribute<"take_back">(nb::find(*this))(slot);
      return;
    }
    const nb::object bucket = attribute<"bucket">(slot);
    const nb::object free = count(bucket, 1);
    if (free.equal(attribute<"slots">(bucket))) {
      set_attribute<"idle_since">(bucket, nb::float_(monotonic_seconds()));
    }
    if (PyList_Append(attribute<"stack">(bucket).ptr(), slot.ptr()) != 0) throw nb::python_error();
  }

 private:
  // Takes a free slot all of which may be in memory already; returns none where there is none.
  [[nodiscard]] nb::object pop(std::uint64_t nbytes) const {
    const std::uint64_t pages = nbytes <= kSmallest ? 1 : std::bit_ceil(nbytes) / kSmallest;
    const nb::object& size = sizes_[static_cast<std::size_t>(std::countr_zero(pages))];
    PyObject* const stack = PyDict_GetItemWithError(stacks_.ptr(), size.ptr());
    const Py_ssize_t free = stack == nullptr ? 0 : PyList_Size(stack);
    if (free <= 0) return {};
    nb::object slot = nb::borrow(PyList_GetItem(stack, free - 1));
    if (!attribute<"touched">(slot).equal(attribute<"size">(slot))) return {};
    if (PyList_SetSlice(stack, free - 1, free, nullptr) != 0) throw nb::python_error();
    count(attribute<"bucket">(slot), -1);
    return slot;
  }

  // Adds to the number of a bucket's free slots; returns that.
  static nb::object count(const nb::object& bucket, int difference) {
    nb::object free = nb::int_(nb::cast<std::int64_t>(attribute<"free">(bucket)) + difference);
    set_attribute<"free">(bucket, free);
    return free;
  }

  nb::dict stacks_;
  nb::list retired_;
  std::array<nb::object, kSizes> sizes_;
};

}  // namespace

void bind_slot_lists(nb::module_& module) {
  nb::class_<SlotLists>(module, "SlotLists")
      .def(nb::init<nb::dict, nb::list>())
      .def("allocate", &SlotLists::allocate)
      .def("free", &SlotLists::free);
}

}  // namespace gpubridge
