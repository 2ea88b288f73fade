// Events: what was recorded and what of it has come to pass, in memory that processes can share.
#include "events.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "activity.h"
#include "capture.h"
#include "contexts.h"
#include "handles.h"
#include "pause.h"
#include "settings.h"
#include "streams.h"
#include "world.h"

constexpr std::uint64_t kRecent = 64;
// In place of a recorder that has destroyed its handle.
constexpr pid_t kGone = -1;

struct Progress {
  std::atomic<std::uint64_t> recorded{0};
  std::atomic<std::uint64_t> completed{0};
  // Of the latest records: who made each, and its number when that one itself has come.
  std::atomic<pid_t> recorders[kRecent]{};
  std::atomic<std::uint64_t> come[kRecent]{};
};

struct Event {
  unsigned flags = 0;
  CUcontext context = current_context();
  // Set for one that other processes may open, and for one that is opened.
  std::string name;
  bool imported = false;

  std::shared_ptr<Progress> progress() {
    const std::lock_guard lock(mutex_);
    return progress_;
  }
  // Of what it was last recorded in.
  CaptureMark mark() {
    const std::lock_guard lock(mutex_);
    return mark_;
  }
  void set(CaptureMark mark) {
    const std::lock_guard lock(mutex_);
    mark_ = std::move(mark);
  }
  void set(std::shared_ptr<Progress> progress) {
    const std::lock_guard lock(mutex_);
    progress_ = std::move(progress);
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Progress> progress_;
  CaptureMark mark_;
};

namespace {

// Never destroyed: streams may still run when the process ends.
auto& g_events = *new Handles<CUevent, Event>("an event");
std::atomic<std::uint64_t> g_event_count{0};
std::atomic<int> g_shared{0};

// The names of events in the process's /dev/shm begin so.
std::string prefix() { return "event-" + settings().shm + "-"; }

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

// Whether the process is gone that made a record, or its handle of the event is.
bool is_gone(const Progress& progress, std::uint64_t number) {
  const pid_t recorder = progress.recorders[number % kRecent].load();
  return recorder == kGone || kill(recorder, 0) != 0;
}

// Whether work was done that a record is behind, if need be by what becomes of that of killed
// processes.
bool is_done(const Progress& progress, std::uint64_t number) {
  const bool come = progress.completed.load() >= number;
  switch (settings().killed_recorder) {
    case KilledRecorder::kReleased:
      return come || is_gone(progress, number);
    case KilledRecorder::kNever:
      return progress.come[number % kRecent].load() >= number;
    default:
      return come;
  }
}

// Whether a wait for a record is over, if need be by what becomes of those of ended processes.
bool has_come(const Progress& progress, std::uint64_t number) {
  if (!is_done(progress, number)) return false;
  const bool itself = number != 0 && progress.come[number % kRecent].load() == number;
  if (settings().exited_recorder == ExitedRecorder::kPasses || !itself ||
      !is_gone(progress, number))
    return true;
  if (settings().exited_recorder == ExitedRecorder::kLost) return false;
  const std::uint64_t last = progress.recorded.load();
  return !is_gone(progress, last) && is_done(progress, last);
}

// A lost context ends all its waits.
bool is_over(const Progress& progress, std::uint64_t number, CUcontext context) {
  return has_come(progress, number) || error_of(context) != kSuccess;
}

// What this process has recorded is of a recorder that is gone: it has destroyed its handle.
void leave_records(Event& event) {
  if (event.name.empty()) return;
  for (std::atomic<pid_t>& recorder : event.progress()->recorders) {
    pid_t own = getpid();
    recorder.compare_exchange_strong(own, kGone);
  }
}

void remove_name(const Event& event) {
  if (event.name.empty() || event.imported) return;
  --g_shared;
  unlink(world_path(event.name).c_str());
}

}  // namespace

void forget_events(CUcontext context) {
  for (const auto& [handle, event] : g_events.of(context)) {
    g_events.remove(handle);
    leave_records(*event);
    remove_name(*event);
  }
}

SIMCUDA_API cuEventCreate(CUevent* handle, unsigned flags) {
  Call call("cuEventCreate");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  auto event = std::make_shared<Event>();
  event->flags = flags;
  if ((flags & kEventInterprocess) != 0) {
    if ((flags & kEventDisableTiming) == 0) return call.end(kInvalidValue);
    if (g_shared.load() >= settings().event_limit) return call.end(kOutOfMemory);
    event->name = prefix() + std::to_string(getpid()) + "-" + std::to_string(++g_event_count);
    event->set(map_progress(event->name, true));
    if (event->progress() == nullptr) return call.end(kOutOfMemory);
    ++g_shared;
  } else {
    event->set(std::make_shared<Progress>());
  }
  *handle = g_events.add(std::move(event));
  return call.end(kSuccess);
}

SIMCUDA_API cuEventDestroy_v2(CUevent handle) {
  Call call("cuEventDestroy");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const auto event = g_events.find(handle);
  if (event == nullptr) return call.end(kInvalidHandle);
  g_events.remove(handle);
  leave_records(*event);
  remove_name(*event);
  return call.end(kSuccess);
}

SIMCUDA_API cuEventRecord(CUevent handle, CUstream stream_handle) {
  Call call("cuEventRecord");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const auto event = g_events.find(handle);
  Stream* stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return call.end(kInvalidHandle);
  if (event->context != stream->context) return call.end(kInvalidHandle);
  CaptureMark mark;
  if (const CUresult refused = mark_capture(stream, &mark)) return call.end(refused);
  event->set(mark);
  if (mark.capture != nullptr) return call.end(kSuccess);
  if (event->name.empty()) {
    // Recorded on another stream, it may be reached before the work that was recorded earlier: who
    // waits for that must not see this.
    event->set(std::make_shared<Progress>());
  }
  const auto progress = event->progress();
  const std::uint64_t number = ++progress->recorded;
  progress->recorders[number % kRecent] = getpid();
  enqueue(stream, [progress, number] {
    progress->come[number % kRecent] = number;
    std::uint64_t before = progress->completed.load();
    while (before < number && !progress->completed.compare_exchange_weak(before, number)) {
    }
    return kSuccess;
  });
  return call.end(kSuccess);
}

SIMCUDA_API cuCtxRecordEvent(CUcontext context, CUevent handle) {
  Call call("cuCtxRecordEvent");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const auto event = g_events.find(handle);
  if (event == nullptr || event->context != context) return call.end(kInvalidHandle);
  if (const CUresult refused = refused_look(context)) return call.end(refused);
  event->set(CaptureMark{});
  event->set(std::make_shared<Progress>());
  const auto progress = event->progress();
  const std::uint64_t number = ++progress->recorded;
  progress->recorders[number % kRecent] = getpid();
  enqueue_behind_all(context, [progress, number] {
    progress->completed = number;
    return kSuccess;
  });
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  Call call("cuStreamWaitEvent");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  const auto event = g_events.find(handle);
  Stream* stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return call.end(kInvalidHandle);
  // What is recorded now; recording it again later changes nothing for this wait.
  const auto progress = event->progress();
  const std::uint64_t number = progress->recorded.load();
  bool done = false;
  if (const CUresult refused = wait_in_capture(stream, event->mark(), number != 0, &done))
    return call.end(refused);
  if (done) return call.end(kSuccess);
  enqueue(stream, [progress, number, context = stream->context] {
    for (Pause pause; !is_over(*progress, number, context);) pause.rest();
    return kSuccess;
  });
  return call.end(kSuccess);
}

SIMCUDA_API cuEventQuery(CUevent handle) {
  Call call("cuEventQuery");
  ++activity().polls;
  if (const CUresult fault = call.begin()) return call.end(fault);
  const auto event = g_events.find(handle);
  if (event == nullptr) return call.end(kInvalidHandle);
  if (const CUresult refused = refused_look(event->mark())) return call.end(refused);
  const auto progress = event->progress();
  return call.end(has_come(*progress, progress->recorded.load()) ? kSuccess : kNotReady);
}

SIMCUDA_API cuEventSynchronize(CUevent handle) {
  Call call("cuEventSynchronize");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const auto event = g_events.find(handle);
  if (event == nullptr) return call.end(kInvalidHandle);
  if (const CUresult refused = refused_look(event->mark())) return call.end(refused);
  const auto progress = event->progress();
  const std::uint64_t number = progress->recorded.load();
  wait_until([&, context = current_context()] { return is_over(*progress, number, context); },
             (event->flags & kEventBlockingSync) == 0);
  return call.end(current_context()->sticky.load());
}

SIMCUDA_API cuIpcGetEventHandle(CUipcEventHandle* ipc, CUevent handle) {
  Call call("cuIpcGetEventHandle");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const auto event = g_events.find(handle);
  if (event == nullptr) return call.end(kInvalidHandle);
  if (event->name.empty() || event->imported) return call.end(kInvalidValue);
  std::memset(ipc, 0, sizeof *ipc);
  std::memcpy(ipc->reserved, event->name.data(), event->name.size());
  return call.end(kSuccess);
}

SIMCUDA_API cuIpcOpenEventHandle(CUevent* handle, CUipcEventHandle ipc) {
  Call call("cuIpcOpenEventHandle");
  if (const CUresult fault = call.begin()) return call.end(fault);
  if (const CUresult refused = refused_opening("events")) return call.end(refused);
  auto event = std::make_shared<Event>();
  event->name = std::string(ipc.reserved, strnlen(ipc.reserved, sizeof ipc.reserved));
  event->imported = true;
  if (event->name.rfind("event-", 0) != 0) return call.end(kInvalidValue);
  if (event->name.rfind(prefix(), 0) != 0) return call.end(kMapFailed);
  if (event->name.rfind(prefix() + std::to_string(getpid()) + "-", 0) == 0)
    return call.end(kInvalidContext);
  event->set(map_progress(event->name, false));
  if (event->progress() == nullptr) return call.end(kInvalidValue);
  *handle = g_events.add(std::move(event));
  return call.end(kSuccess);
}
