#include <time.h>

#include "dataplane.h"
#include "python_object.h"

namespace gpubridge {
namespace {

// Slots of up to so many bytes have sizes that are powers of two.
constexpr std::uint64_t kSmallest = 4096;
constexpr std::uint64_t kLargest = std::uint64_t{1} << 16U;
constexpr std::size_t kSizes = 5;

struct Names {
  Attribute allocate_new{"allocate_new"};
  Attribute body{"body"};
  Attribute bucket{"bucket"};
  Attribute free{"free"};
  Attribute idle_since{"idle_since"};
  Attribute size{"size"};
  Attribute slots{"slots"};
  Attribute stack{"stack"};
  Attribute take_back{"take_back"};
  Attribute touched{"touched"};
};

const Names& names() {
  static const Names made;
  return made;
}

bool equal(const nb::object& one, const nb::object& other) {
  return one.is(other) || PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ) == 1;
}

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
    return names().allocate_new.of(nb::find(*this))(nbytes);
  }

  void free(nb::handle slot) const {
    if (!names().body.of(slot).is_none() || nb::len(retired_) != 0) {
      names().take_back.of(nb::find(*this))(slot);
      return;
    }
    const nb::object bucket = names().bucket.of(slot);
    const nb::object free = count(bucket, 1);
    if (equal(free, names().slots.of(bucket))) {
      timespec now{};
      clock_gettime(CLOCK_MONOTONIC, &now);
      const double seconds =
          static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
      names().idle_since.set(bucket, nb::float_(seconds));
    }
    if (PyList_Append(names().stack.of(bucket).ptr(), slot.ptr()) != 0) throw nb::python_error();
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
    if (!equal(names().touched.of(slot), names().size.of(slot))) return {};
    if (PyList_SetSlice(stack, free - 1, free, nullptr) != 0) throw nb::python_error();
    count(names().bucket.of(slot), -1);
    return slot;
  }

  // Adds to the number of a bucket's free slots; returns that.
  static nb::object count(const nb::object& bucket, int difference) {
    nb::object free = nb::int_(nb::cast<std::int64_t>(names().free.of(bucket)) + difference);
    names().free.set(bucket, free);
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
