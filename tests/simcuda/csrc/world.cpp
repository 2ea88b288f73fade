#include "world.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "capture.h"
#include "contexts.h"
#include "driver_lock.h"
#include "settings.h"

namespace {

int open_log(const char* name) {
  return open(world_path(name).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

void write_line(int descriptor, const std::string& line) {
  // One write per line: the lines of several processes stay whole.
  [[maybe_unused]] const ssize_t written = write(descriptor, line.data(), line.size());
}

// Questions of a thread's own, and of what devices there are.
bool needs_no_driver(const std::string& name) {
  for (const char* prefix : {"cuCtxGet", "cuCtxSet", "cuCtxPush", "cuCtxPop", "cuDeviceGet"})
    if (name.rfind(prefix, 0) == 0) return true;
  return false;
}

}  // namespace

std::string world_path(const std::string& name) {
  const char* directory = std::getenv("SIMCUDA_DIR");
  return std::string(directory == nullptr ? "/nonexistent" : directory) + "/" + name;
}

Control& control() {
  static Control* page = [] {
    const int descriptor = open(world_path("control").c_str(), O_RDWR | O_CLOEXEC);
    void* mapped = descriptor < 0 ? MAP_FAILED
                                  : mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE,
                                         MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
      // No machine: as if there were no device.
      static Control none{};
      return &none;
    }
    close(descriptor);
    return static_cast<Control*>(mapped);
  }();
  return *page;
}

void violation(const std::string& text) {
  static const int descriptor = open_log("violations");
  write_line(descriptor, std::to_string(getpid()) + " " + text + "\n");
}

CUresult Call::begin(bool needs_context) {
  for (Fault& fault : control().faults) {
    if (fault.armed.load() == 0 || std::strcmp(fault.call, name_) != 0) continue;
    std::int64_t left = fault.countdown.load();
    // Of a call that was to fail once, the ones after it are right.
    while (left > 0 && !fault.countdown.compare_exchange_weak(left, left - 1)) {
    }
    if (left < 0 || left == 1) {
      if (fault.code == kUnknown && settings().unknown_sticks && needs_context)
        if (CUcontext context = current_context()) context->sticky = kUnknown;
      return fault.code;
    }
  }
  if (!initialized()) return kNotInitialized;
  if (!needs_no_driver(name_)) wait_for_driver();
  if (const CUresult refused = refused_by_capture(name_)) return refused;
  if (!needs_context) return kSuccess;
  if (current_context() == nullptr) return kInvalidContext;
  if (current_context()->retained.load() == 0) return kContextIsDestroyed;
  return error_of(current_context());
}

CUresult Call::end(CUresult result) {
  static const int descriptor = open_log("calls");
  write_line(descriptor, std::to_string(getpid()) + " " + name_ + "(" + arguments_ +
                             ")=" + std::to_string(result) + "\n");
  return result;
}
