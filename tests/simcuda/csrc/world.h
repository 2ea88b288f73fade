// What all processes of a simulated machine share: a directory with a control page, the memory of
// the devices, the events that cross processes, and what was noted of calls and of rules that were
// broken.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "driver_types.h"

constexpr int kDevices = 2;
constexpr int kFaults = 32;
constexpr int kActivities = 256;

struct Fault {
  char call[48];
  // The n-th call from now on fails; -1: each one does.
  std::atomic<std::int64_t> countdown;
  std::int32_t code;
  std::atomic<std::int32_t> armed;
};

// Of one process; times are in microseconds.
struct Activity {
  std::atomic<std::int32_t> pid;
  // For which it held the lock of the driver; and for which its calls waited for that.
  std::atomic<std::uint64_t> held_us;
  std::atomic<std::uint64_t> stalled_us;
  // What opening, closing and allocating cost.
  std::atomic<std::uint64_t> paid_us;
  // Waits for work: those that burn a processor, and those that sleep.
  std::atomic<std::uint64_t> spun_us;
  std::atomic<std::uint64_t> slept_us;
  // Questions whether work is done: no time, their number.
  std::atomic<std::uint64_t> polls;
};

// Written by tests (tests/simcuda/machine.py knows the same layout); the end is written here.
struct Control {
  std::atomic<std::uint32_t> longest_delay_us;
  std::uint32_t seed;
  std::uint32_t devices;
  std::uint32_t peer_access;
  // 0: any process may use the devices; 3: one only.
  std::uint32_t compute_mode;
  // 1: memory cannot be exported as a file descriptor.
  std::uint32_t without_fds;
  std::uint64_t memory_bytes;
  // How often the file "settings" was written (settings.h).
  std::atomic<std::uint64_t> settings_version;
  std::atomic<std::uint64_t> used_bytes[kDevices];
  Fault faults[kFaults];
  std::atomic<std::uint64_t> driver_held_until_us;
  Activity activities[kActivities];
};

Control& control();
std::string world_path(const std::string& name);

// Note that a rule was broken; the test that looks fails.
void violation(const std::string& text);

// One call of the interface: injected faults, what must hold before it, and its line in the record.
class Call {
 public:
  explicit Call(const char* name) : name_(name) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  template <typename T>
  Call& with(T value) {
    arguments_ += (arguments_.empty() ? "" : ",") + std::to_string(value);
    return *this;
  }

  // Returns what the call has to fail with before it does anything, or success.
  CUresult begin(bool needs_context = true);
  CUresult end(CUresult result);

 private:
  const char* name_;
  std::string arguments_;
};
