// The idle connections of an endpoint, in the order in which they became idle.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <list>
#include <optional>
#include <utility>

namespace gpubridge {

namespace nb = nanobind;

// The owners of connections without a request, those that have been so for longest first.
class IdleConnections {
 public:
  // The first ones, at most `count`.
  [[nodiscard]] nb::list first(std::size_t count) const {
    nb::list owners;
    for (nb::handle owner : owners_) {
      if (count-- == 0) break;
      owners.append(owner);
    }
    return owners;
  }
  [[nodiscard]] std::size_t size() const { return owners_.size(); }

 private:
  friend class IdlePlace;
  std::list<nb::handle> owners_;
};

// The place of one connection among them, while it is idle; its owner must live until it leaves.
class IdlePlace {
 public:
  explicit IdlePlace(nb::object connections)
      : object_(std::move(connections)), connections_(nb::cast<IdleConnections*>(object_)) {}
  IdlePlace(const IdlePlace&) = delete;
  IdlePlace& operator=(const IdlePlace&) = delete;
  ~IdlePlace() { leave(); }

  // Shows the collector what it holds.
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(object_.ptr());
    return 0;
  }

  // Takes a place behind all others, unless it has one.
  void enter(nb::handle owner) {
    auto& owners = connections_->owners_;
    if (!place_) place_ = owners.insert(owners.end(), owner);
  }
  void leave() {
    if (place_) connections_->owners_.erase(*std::exchange(place_, std::nullopt));
  }

 private:
  nb::object object_;
  IdleConnections* connections_;
  std::optional<std::list<nb::handle>::iterator> place_;
};

}  // namespace gpubridge
