// The batcher of Python objects: a handle is an object's address.
#pragma once

#include <tuple>

#include "python_object.h"
#include "schedule/dynamic_batcher.h"

namespace gpubridge {

// item, size, shape, priority, arrived
using ItemFields = std::tuple<nb::object, std::uint64_t, std::uint64_t, std::uint64_t, Nanoseconds>;

inline Handle handle_of(nb::handle item) { return reinterpret_cast<Handle>(item.ptr()); }
inline nb::handle item_of(Handle handle) { return {reinterpret_cast<PyObject*>(handle)}; }

// A queued request holds one reference to its object, one with a place in the order of outcomes
// another.
class ItemBatcher {
 public:
  explicit ItemBatcher(const BatchingSettings& settings)
      : batcher_(settings), keeps_order_(settings.keep_order) {}
  ItemBatcher(const ItemBatcher&) = delete;
  ItemBatcher& operator=(const ItemBatcher&) = delete;
  ~ItemBatcher() { clear(); }

  [[nodiscard]] std::size_t pending() const { return batcher_.pending(); }

  // The request's handle is the item's.
  DynamicBatcher::Admission add(nb::handle item, QueuedRequest request, Nanoseconds now) {
    check_absent(item);
    request.handle = handle_of(item);
    const auto admission = batcher_.add(request, now);
    if (admission == DynamicBatcher::Admission::kAccepted) item.inc_ref();
    return admission;
  }

  // A list of the items of the next batch, `most` of them at most; None where no batch is due.
  nb::object take(Nanoseconds now, std::size_t most) {
    std::vector<Handle> batch;
    return batcher_.take(now, most, batch) ? nb::object(taken(batch)) : nb::none();
  }
  nb::object take_ahead(Nanoseconds now, std::size_t most) {
    std::vector<Handle> batch;
    return batcher_.take_ahead(now, most, batch) ? nb::object(taken(batch)) : nb::none();
  }

  [[nodiscard]] std::optional<Nanoseconds> next_wakeup(Nanoseconds now) {
    return batcher_.next_wakeup(now);
  }
  nb::list refused(Nanoseconds now) { return given_away(batcher_.refused(now)); }
  nb::list take_all() { return given_away(batcher_.clear()); }

  [[nodiscard]] bool cancel(nb::handle item) {
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
  void clear() {
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

  nb::list taken(const std::vector<Handle>& batch) {
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

}  // namespace gpubridge
