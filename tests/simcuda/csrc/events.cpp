// Events: what was recorded and what of it has come to pass, in memory that processes can share.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "contexts.h"
#include "streams.h"
#include "world.h"

struct Progress {
  std::atomic<std::uint64_t> recorded{0};
  std::atomic<std::uint64_t> completed{0};
};

struct Event {
  unsigned flags = 0;
  CUcontext context = current_context();
  // Set for one that other processes may open, and for one that is opened.
  std::string name;
  bool imported = false;
  std::shared_ptr<Progress> progress;
};

namespace {

// Never destroyed: streams may still run when the process ends.
std::mutex& g_mutex = *new std::mutex;
auto& g_events = *new std::map<Event*, std::unique_ptr<Event>>;
std::uint64_t g_count = 0;

std::shared_ptr<Progress> map_progress(const std::string& name, bool create) {
  const int descriptor =
      open(world_path(name).c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);
  if (descriptor < 0) return nullptr;
  void* mapped = MAP_FAILED;
  if (!create || ftruncate(descriptor, sizeof(Progress)) == 0)
    mapped = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (mapped == MAP_FAILED) return nullptr;
  return {static_cast<Progress*>(mapped), [](Progress* page) { munmap(page, sizeof(Progress)); }};
}

Event* add(std::unique_ptr<Event> event) {
  const std::lock_guard lock(g_mutex);
  Event* handle = event.get();
  g_events.emplace(handle, std::move(event));
  return handle;
}

// Returns null, and notes it, for what is no event, or is none any more.
Event* find(CUevent handle) {
  const std::lock_guard lock(g_mutex);
  if (g_events.count(handle) != 0) return handle;
  violation("use of an event that is none, or was destroyed");
  return nullptr;
}

void wait_for(const Progress& progress, std::uint64_t number, CUcontext context) {
  // Of an event whose process has died, or whose context is lost, this never comes.
  while (progress.completed.load() < number && context->sticky.load() == kSuccess)
    std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace

SIMCUDA_API cuEventCreate(CUevent* handle, unsigned flags) {
  Call call("cuEventCreate");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  auto event = std::make_unique<Event>();
  event->flags = flags;
  if ((flags & kEventInterprocess) != 0) {
    if ((flags & kEventDisableTiming) == 0) return call.end(kInvalidValue);
    {
      const std::lock_guard lock(g_mutex);
      event->name = "event-" + std::to_string(getpid()) + "-" + std::to_string(++g_count);
    }
    event->progress = map_progress(event->name, true);
    if (event->progress == nullptr) return call.end(kOutOfMemory);
  } else {
    event->progress = std::make_shared<Progress>();
  }
  *handle = add(std::move(event));
  return call.end(kSuccess);
}

SIMCUDA_API cuEventDestroy_v2(CUevent handle) {
  Call call("cuEventDestroy");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Event* event = find(handle);
  if (event == nullptr) return call.end(kInvalidHandle);
  if (!event->name.empty() && !event->imported) unlink(world_path(event->name).c_str());
  const std::lock_guard lock(g_mutex);
  g_events.erase(event);
  return call.end(kSuccess);
}

SIMCUDA_API cuEventRecord(CUevent handle, CUstream stream_handle) {
  Call call("cuEventRecord");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Event* event = find(handle);
  Stream* stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return call.end(kInvalidHandle);
  if (event->name.empty()) {
    // Recorded on another stream, it may be reached before the work that was recorded earlier: who
    // waits for that must not see this.
    const std::lock_guard lock(g_mutex);
    event->progress = std::make_shared<Progress>();
  }
  auto progress = event->progress;
  if (event->context != stream->context) return call.end(kInvalidHandle);
  const std::uint64_t number = ++progress->recorded;
  enqueue(stream, [progress, number] {
    std::uint64_t before = progress->completed.load();
    while (before < number && !progress->completed.compare_exchange_weak(before, number)) {
    }
    return kSuccess;
  });
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  Call call("cuStreamWaitEvent");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  Event* event = find(handle);
  Stream* stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return call.end(kInvalidHandle);
  // What is recorded now; recording it again later changes nothing for this wait.
  auto progress = event->progress;
  const std::uint64_t number = progress->recorded.load();
  enqueue(stream, [progress, number, context = stream->context] {
    wait_for(*progress, number, context);
    return kSuccess;
  });
  return call.end(kSuccess);
}

SIMCUDA_API cuEventQuery(CUevent handle) {
  Call call("cuEventQuery");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Event* event = find(handle);
  if (event == nullptr) return call.end(kInvalidHandle);
  const Progress& progress = *event->progress;
  return call.end(progress.completed.load() >= progress.recorded.load() ? kSuccess : kNotReady);
}

SIMCUDA_API cuEventSynchronize(CUevent handle) {
  Call call("cuEventSynchronize");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Event* event = find(handle);
  if (event == nullptr) return call.end(kInvalidHandle);
  wait_for(*event->progress, event->progress->recorded.load(), current_context());
  return call.end(current_context()->sticky.load());
}

SIMCUDA_API cuIpcGetEventHandle(CUipcEventHandle* ipc, CUevent handle) {
  Call call("cuIpcGetEventHandle");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Event* event = find(handle);
  if (event == nullptr) return call.end(kInvalidHandle);
  if (event->name.empty() || event->imported) return call.end(kInvalidValue);
  std::memset(ipc, 0, sizeof *ipc);
  std::memcpy(ipc->reserved, event->name.data(), event->name.size());
  return call.end(kSuccess);
}

SIMCUDA_API cuIpcOpenEventHandle(CUevent* handle, CUipcEventHandle ipc) {
  Call call("cuIpcOpenEventHandle");
  if (const CUresult fault = call.begin()) return call.end(fault);
  auto event = std::make_unique<Event>();
  event->name = std::string(ipc.reserved, strnlen(ipc.reserved, sizeof ipc.reserved));
  event->imported = true;
  if (event->name.rfind("event-", 0) != 0) return call.end(kInvalidValue);
  if (event->name.rfind("event-" + std::to_string(getpid()) + "-", 0) == 0)
    return call.end(kInvalidContext);
  event->progress = map_progress(event->name, false);
  if (event->progress == nullptr) return call.end(kInvalidValue);
  *handle = add(std::move(event));
  return call.end(kSuccess);
}
