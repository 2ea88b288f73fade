#include "streams.h"

#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "contexts.h"
#include "world.h"

namespace {

// Never destroyed: streams may still run when the process ends.
std::mutex& g_mutex = *new std::mutex;
auto& g_streams = *new std::map<Stream*, std::unique_ptr<Stream>>;
auto& g_legacy = *new std::map<CUcontext, std::unique_ptr<Stream>>;

std::vector<Stream*> streams_of(CUcontext context) {
  std::vector<Stream*> found;
  for (const auto& [stream, owned] : g_streams)
    if (stream->context == context) found.push_back(stream);
  return found;
}

Stream* legacy_of(CUcontext context) {
  auto& legacy = g_legacy[context];
  if (legacy == nullptr) legacy = std::make_unique<Stream>(context, 0);
  return legacy.get();
}

}  // namespace

Stream::Stream(CUcontext owner, unsigned stream_flags)
    : context(owner), flags(stream_flags), thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  // Work that waits for another process may never be done: the process ends without it.
  thread_.detach();
}

std::uint64_t Stream::add(Work work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
  return ++added_;
}

void Stream::wait(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

bool Stream::reached(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return done_ >= number;
}

std::uint64_t Stream::last() {
  const std::lock_guard lock(mutex_);
  return added_;
}

void Stream::run() {
  const Current current(context);
  std::minstd_rand random(control().seed + static_cast<unsigned>(getpid()));
  while (true) {
    Work work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty() || closing_; });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    const unsigned longest = control().longest_delay_us.load();
    if (longest != 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % longest));
    // Of a context that is lost nothing is done any more, nor is anything that was recorded.
    if (context->sticky.load() == kSuccess)
      if (const CUresult result = work(); result != kSuccess) context->sticky = result;
    const std::lock_guard lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

Stream* find_stream(CUstream handle) {
  const std::lock_guard lock(g_mutex);
  if (handle == nullptr || handle == legacy_stream()) return legacy_of(current_context());
  const auto found = g_streams.find(handle);
  if (found == g_streams.end()) {
    violation("use of a stream that is none, or was destroyed");
    return nullptr;
  }
  return found->first;
}

std::uint64_t enqueue(Stream* stream, Work work) {
  const std::lock_guard lock(g_mutex);
  Stream* legacy = legacy_of(stream->context);
  std::vector<std::pair<Stream*, std::uint64_t>> before;
  if (stream == legacy) {
    for (Stream* other : streams_of(stream->context))
      if ((other->flags & kStreamNonBlocking) == 0) before.emplace_back(other, other->last());
  } else if ((stream->flags & kStreamNonBlocking) == 0) {
    before.emplace_back(legacy, legacy->last());
  }
  return stream->add([before = std::move(before), work = std::move(work)] {
    for (const auto& [other, number] : before) other->wait(number);
    return work();
  });
}

void synchronize(CUcontext context) {
  std::vector<std::pair<Stream*, std::uint64_t>> all;
  {
    const std::lock_guard lock(g_mutex);
    for (Stream* stream : streams_of(context)) all.emplace_back(stream, stream->last());
    Stream* legacy = legacy_of(context);
    all.emplace_back(legacy, legacy->last());
  }
  for (const auto& [stream, number] : all) stream->wait(number);
}

SIMCUDA_API cuStreamCreate(CUstream* stream, unsigned flags) {
  Call call("cuStreamCreate");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  auto made = std::make_unique<Stream>(current_context(), flags);
  *stream = made.get();
  const std::lock_guard lock(g_mutex);
  g_streams.emplace(made.get(), std::move(made));
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  return cuStreamCreate(stream, flags);
}

SIMCUDA_API cuStreamDestroy_v2(CUstream handle) {
  Call call("cuStreamDestroy");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr || handle == nullptr) return call.end(kInvalidHandle);
  stream->wait(stream->last());
  const std::lock_guard lock(g_mutex);
  // Its thread may be about to look once more: a stream is small, and stays.
  static auto& retired = *new std::vector<std::unique_ptr<Stream>>;
  retired.push_back(std::move(g_streams[stream]));
  g_streams.erase(stream);
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamSynchronize(CUstream handle) {
  Call call("cuStreamSynchronize");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  // On the legacy stream this waits for the blocking streams too.
  stream->wait(enqueue(stream, [] { return kSuccess; }));
  return call.end(current_context()->sticky.load());
}

SIMCUDA_API cuStreamQuery(CUstream handle) {
  Call call("cuStreamQuery");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  return call.end(stream->reached(stream->last()) ? kSuccess : kNotReady);
}

SIMCUDA_API cuStreamGetFlags(CUstream handle, unsigned* flags) {
  Call call("cuStreamGetFlags");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  *flags = stream->flags;
  return call.end(kSuccess);
}

SIMCUDA_API cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  Call call("cuLaunchHostFunc");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  enqueue(stream, [function, data] {
    function(data);
    return kSuccess;
  });
  return call.end(kSuccess);
}
