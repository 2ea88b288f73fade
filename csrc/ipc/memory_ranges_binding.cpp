#include "ipc/memory_ranges_binding.h"

#include "heap_type.h"
#include "python_object.h"

namespace gpubridge {
namespace {

// Lives as long as the process.
struct PythonParts {
  nb::module_ requests = nb::module_::import_("gpubridge.request");
  PyObject* range = kept_attribute(requests, "MemoryRange");
  PyObject* empty = kept_attribute(requests, "NO_BYTES");
  PyObject* segment = kept_attribute(nb::module_::import_("gpubridge.host_shm"), "Segment");
};

const PythonParts& python() {
  static const auto* const made = new PythonParts();
  return *made;
}

bool is_host_segment(nb::handle segment) {
  return PyObject_TypeCheck(segment.ptr(), reinterpret_cast<PyTypeObject*>(python().segment)) != 0;
}

}  // namespace

RangeView::RangeView(nb::handle range)
    : segment(tuple_item(range, 0)),
      offset(number_of(tuple_item(range, 1))),
      nbytes(number_of(tuple_item(range, 2))),
      keep(tuple_item(range, 3)) {}

nb::object make_range(nb::handle segment, std::uint64_t offset, std::uint64_t nbytes,
                      nb::handle keep) {
  return named_tuple(python().range, segment, offset, nbytes, keep);
}

nb::object empty_range() { return nb::borrow(python().empty); }

RangeItem StubRanges::of(const TensorRef& ref, nb::handle keep) {
  if (ref.nbytes != 0) {
    if (!segment_.is_valid() || region_ != ref.region) {
      const nb::object segments = attribute<"_segments">(memory_);
      segment_ = checked(PyObject_GetItem(segments.ptr(), nb::int_(ref.region).ptr()));
      region_ = ref.region;
    }
    return {segment_, ref.offset, ref.nbytes, nb::borrow(keep)};
  }
  // Of a tensor without elements the reference only says on which device it is, if on one.
  if ((ref.region & kArenaRegion) == 0 ||
      !nb::cast<bool>(attribute<"is_known">(memory_)(ref.region))) {
    return {};
  }
  return {attribute<"segment">(memory_)(ref.region), 0, 0, nb::none()};
}

bool are_on_host(nb::handle ranges) {
  return !any_range(ranges, [](const RangeView& range) {
    return !range.segment.is_none() && !is_host_segment(range.segment);
  });
}

bool for_others(nb::handle ranges, nb::handle model) {
  nb::handle latest;  // the segments of one call are mostly the same
  return any_range(ranges, [&](const RangeView& range) {
    if (range.segment.is(latest)) return false;
    latest = range.segment;
    return is_host_segment(latest) && !attribute<"home">(latest).equal(model);
  });
}

std::uint64_t RegionNames::of(nb::handle segment, bool read_only) const {
  if (is_host_segment(segment)) {
    nb::object region = attribute<"region">(segment);
    std::uint64_t number = number_of(region);
    if (read_only) region = nb::int_(number |= kReadOnlyRegion);
    const int known = PySet_Contains(known_.ptr(), region.ptr());
    if (known < 0) throw nb::python_error();
    if (known != 0) return number;
  }
  using namespace nb::literals;
  return nb::cast<std::uint64_t>(attribute<"name">(announcer_)(segment, "read_only"_a = read_only));
}

char* RegionNames::write(char* at, nb::handle ranges, std::uint32_t lease, bool read_only) const {
  nb::handle latest;
  std::uint64_t region = 0;  // of that segment
  any_range(ranges, [&](const RangeView& view) {
    TensorRef ref{0, 0, 0, kNoLease};
    if (!view.segment.is_none()) {
      if (!view.segment.is(latest)) region = of(view.segment, read_only);
      latest = view.segment;
      ref = {region, view.offset, view.nbytes, view.nbytes == 0 ? kNoLease : lease};
    }
    at = write_ref(at, ref);
    return false;
  });
  return at;
}

}  // namespace gpubridge
