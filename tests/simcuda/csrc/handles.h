// Handles: names of streams and events, which are no pointers. As those of a real driver they are
// given again when their object was destroyed: who keeps one for too long means another object.
#pragma once

#include <csignal>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "settings.h"
#include "world.h"

template <typename Handle, typename T>
class Handles {
 public:
  explicit Handles(const char* kind) : kind_(kind) {}

  Handle add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    auto handle = reinterpret_cast<Handle>(kFirst + kStep * (count_ + 1));
    if (settings().destroyed == Destroyed::kReused && !destroyed_.empty()) {
      handle = destroyed_.back();
      destroyed_.pop_back();
    } else {
      ++count_;
    }
    objects_.emplace(handle, std::move(object));
    return handle;
  }

  // Returns null, and notes it, for a handle of nothing.
  std::shared_ptr<T> find(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found != objects_.end()) return found->second;
    violation("use of " + kind_ + " that is none, or was destroyed");
    if (settings().destroyed == Destroyed::kCrash) std::raise(SIGSEGV);
    return nullptr;
  }

  // Ends a handle, which `find` has found.
  void remove(Handle handle) {
    const std::lock_guard lock(mutex_);
    if (objects_.erase(handle) == 1) destroyed_.push_back(handle);
  }

  std::vector<std::pair<Handle, std::shared_ptr<T>>> of(CUcontext context) {
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<Handle, std::shared_ptr<T>>> found;
    for (const auto& entry : objects_)
      if (entry.second->context == context) found.emplace_back(entry);
    return found;
  }

 private:
  // Where nothing is mapped.
  static constexpr std::uintptr_t kFirst = 0x8000;
  static constexpr std::uintptr_t kStep = 16;

  const std::string kind_;
  std::mutex mutex_;
  std::map<Handle, std::shared_ptr<T>> objects_;
  std::vector<Handle> destroyed_;
  std::uintptr_t count_ = 0;
};
