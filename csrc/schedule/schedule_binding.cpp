#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dataplane.h"
#include "schedule/dynamic_batcher.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

// delays_late, timeout_us, may_be_shorter, most
using PolicyFields = std::tuple<bool, std::uint64_t, bool, std::uint64_t>;
// item, size, shape, priority, arrived
using ItemFields = std::tuple<nb::object, std::uint64_t, std::uint64_t, std::uint64_t, Nanoseconds>;

QueuePolicy policy_of(const PolicyFields& fields) {
  const auto [delays_late, timeout_us, may_be_shorter, most] = fields;
  return {delays_late, from_microseconds(timeout_us), may_be_shorter, most};
}

Handle handle_of(nb::handle item) { return reinterpret_cast<Handle>(item.ptr()); }
nb::handle item_of(Handle handle) { return {reinterpret_cast<PyObject*>(handle)}; }

// The batcher of Python objects: a handle is an object's address. What is queued holds one
// reference to its object, what has a place in the order of outcomes another.
class ItemBatcher {
 public:
  explicit ItemBatcher(const BatchingSettings& settings)
      : batcher_(settings), keeps_order_(settings.keep_order) {}
  ItemBatcher(const ItemBatcher&) = delete;
  ItemBatcher& operator=(const ItemBatcher&) = delete;
  ~ItemBatcher() { release_all(); }

  [[nodiscard]] std::size_t pending() const { return batcher_.pending(); }

  int add(nb::handle item, std::uint64_t size, std::uint64_t shape, std::uint64_t priority,
          std::uint64_t timeout_us, Nanoseconds now) {
    check_absent(item);
    const auto admission = batcher_.add(
        {handle_of(item), size, shape, priority, from_microseconds(timeout_us), now}, now);
    if (admission == DynamicBatcher::Admission::kAccepted) item.inc_ref();
    return static_cast<int>(admission);
  }

  nb::object take(nb::handle, Nanoseconds now) {
    std::vector<Handle> batch;
    batcher_.take(now, batch);
    return taken(batch);
  }
  nb::object take_ahead(nb::handle, Nanoseconds now) {
    std::vector<Handle> batch;
    batcher_.take_ahead(now, batch);
    return taken(batch);
  }

  std::optional<Nanoseconds> next_wakeup(Nanoseconds now) { return batcher_.next_wakeup(now); }
  nb::list refused(Nanoseconds now) { return given_away(batcher_.refused(now)); }
  nb::list clear() { return given_away(batcher_.clear()); }

  bool cancel(nb::handle item) {
    const bool was_queued = batcher_.cancel(handle_of(item));
    if (was_queued) item.dec_ref();
    return was_queued;
  }

  void put_back(const std::vector<ItemFields>& items) {
    std::vector<QueuedRequest> requests;
    requests.reserve(items.size());
    for (const auto& [item, size, shape, priority, arrived] : items) {
      check_absent(item);
      requests.push_back({handle_of(item), size, shape, priority, 0, arrived});
    }
    batcher_.put_back(requests);
    for (const ItemFields& item : items) std::get<0>(item).inc_ref();
  }

  nb::list answered(nb::handle item) {
    if (!ordered_.contains(handle_of(item))) {
      nb::list itself;
      itself.append(item);
      return itself;
    }
    return released(batcher_.answered(handle_of(item)));
  }
  nb::list releasable() { return released(batcher_.release()); }
  nb::list abandon_order() { return released(batcher_.abandon_order()); }
  void stop() { batcher_.stop(); }

  int traverse(visitproc visit, void* argument) const {
    int result = 0;
    batcher_.visit([&](Handle handle) {
      if (result == 0) result = visit(item_of(handle).ptr(), argument);
    });
    for (const auto& [handle, item] : ordered_) {
      if (result == 0) result = visit(item.ptr(), argument);
    }
    return result;
  }
  void release_all() {
    const nb::list queued = given_away(batcher_.clear());
    batcher_.abandon_order();
    const auto ordered = std::exchange(ordered_, {});
  }

 private:
  void check_absent(nb::handle item) const {
    if (batcher_.queued(handle_of(item))) throw nb::value_error("the item is queued already");
  }

  // A list of objects whose references the batcher held.
  static nb::list given_away(const std::vector<Handle>& handles) {
    nb::list items;
    for (const Handle handle : handles) items.append(nb::steal(item_of(handle)));
    return items;
  }

  nb::object taken(const std::vector<Handle>& batch) {
    if (batch.empty()) return nb::none();
    nb::list items = given_away(batch);
    if (keeps_order_) {
      for (const Handle handle : batch) ordered_.try_emplace(handle, nb::borrow(item_of(handle)));
    }
    return items;
  }

  nb::list released(const ReleaseOrder::Released& released) {
    nb::list items;
    for (const Handle handle : released.due) items.append(ordered_.extract(handle).mapped());
    for (const Handle handle : released.dropped) ordered_.erase(handle);
    return items;
  }

  DynamicBatcher batcher_;
  bool keeps_order_;
  std::unordered_map<Handle, nb::object> ordered_;
};

int traverse_batcher(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<ItemBatcher>(self)->traverse(visit, arg) : 0;
}

int clear_batcher(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<ItemBatcher>(self)->release_all();
  return 0;
}

PyType_Slot batcher_slots[] = {// NOLINT: the C API's own form
                               {Py_tp_traverse, reinterpret_cast<void*>(traverse_batcher)},
                               {Py_tp_clear, reinterpret_cast<void*>(clear_batcher)},
                               {0, nullptr}};

}  // namespace

void bind_schedule(nb::module_& module) {
  nb::class_<ItemBatcher>(module, "DynamicBatcher", nb::type_slots(batcher_slots))
      .def(
          "__init__",
          [](ItemBatcher* self, std::uint64_t max_batch_size,
             const std::vector<std::uint64_t>& preferred, std::uint64_t max_delay_us,
             bool keep_order, std::uint64_t levels, std::uint64_t default_level,
             const PolicyFields& policy, const std::map<std::uint64_t, PolicyFields>& policies) {
            BatchingSettings settings{max_batch_size,    preferred, from_microseconds(max_delay_us),
                                      keep_order,        levels,    default_level,
                                      policy_of(policy), {}};
            for (const auto& [level, own] : policies) {
              settings.policies.emplace(level, policy_of(own));
            }
            new (self) ItemBatcher(settings);
          },
          nb::arg("max_batch_size"), nb::arg("preferred") = std::vector<std::uint64_t>(),
          nb::arg("max_delay_us") = 0, nb::arg("keep_order") = false, nb::arg("levels") = 0,
          nb::arg("default_level") = 0, nb::arg("policy") = PolicyFields(false, 0, false, 0),
          nb::arg("policies") = std::map<std::uint64_t, PolicyFields>())
      .def_prop_ro("pending", &ItemBatcher::pending)
      .def("add", &ItemBatcher::add)
      .def("take", &ItemBatcher::take)
      .def("take_ahead", &ItemBatcher::take_ahead)
      .def("next_wakeup", &ItemBatcher::next_wakeup)
      .def("refused", &ItemBatcher::refused)
      .def("cancel", &ItemBatcher::cancel)
      .def("put_back", &ItemBatcher::put_back)
      .def("answered", &ItemBatcher::answered)
      .def("releasable", &ItemBatcher::releasable)
      .def("abandon_order", &ItemBatcher::abandon_order)
      .def("stop", &ItemBatcher::stop)
      .def("clear", &ItemBatcher::clear);
}

}  // namespace gpubridge
