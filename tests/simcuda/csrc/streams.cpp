#include "streams.h"

#include <unistd.h>

#include <chrono>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "activity.h"
#include "capture.h"
#include "contexts.h"
#include "handles.h"
#include "world.h"

namespace {

struct StreamEntry {
  CUcontext context;
  Stream* stream;
};

// Never destroyed: streams may still run when the process ends.
std::mutex& g_streams_mutex = *new std::mutex;
auto& g_streams = *new Handles<CUstream, StreamEntry>("a stream");
auto& g_legacy = *new std::map<CUcontext, Stream*>;
auto& g_per_thread = *new std::multimap<CUcontext, Stream*>;
// Destroyed, with work that is still to be done.
auto& g_draining = *new std::multimap<CUcontext, Stream*>;
// A thread's own, by the context that was there: it is another one when that was made anew.
thread_local std::map<std::string, Stream*> t_streams;

std::vector<Stream*> streams_of(CUcontext context) {
  std::vector<Stream*> found;
  for (const auto& [handle, entry] : g_streams.of(context)) found.push_back(entry->stream);
  for (const auto* unnamed : {&g_per_thread, &g_draining}) {
    const auto [first, last] = unnamed->equal_range(context);
    for (auto each = first; each != last; ++each) found.push_back(each->second);
  }
  return found;
}

Stream* legacy_of(CUcontext context) {
  auto& legacy = g_legacy[context];
  if (legacy == nullptr) legacy = new Stream(context, 0);
  return legacy;
}

Stream* per_thread_of(CUcontext context) {
  auto& own = t_streams[context->name];
  if (own == nullptr) {
    own = new Stream(context, 0);
    g_per_thread.emplace(context, own);
  }
  return own;
}

void drain(Stream* stream) {
  const std::lock_guard lock(g_streams_mutex);
  for (auto each = g_draining.begin(); each != g_draining.end();)
    each = each->second->reached(each->second->last()) ? g_draining.erase(each) : std::next(each);
  g_draining.emplace(stream->context, stream);
  stream->close();
}

// The streams of a context, each with its last work.
std::vector<std::pair<Stream*, std::uint64_t>> all_work_of(CUcontext context) {
  const std::lock_guard lock(g_streams_mutex);
  std::vector<std::pair<Stream*, std::uint64_t>> all;
  for (Stream* stream : streams_of(context)) all.emplace_back(stream, stream->last());
  Stream* legacy = legacy_of(context);
  all.emplace_back(legacy, legacy->last());
  return all;
}

bool is_allowed(const Stream& stream, Use use) {
  CUcontext current = current_context();
  if (use == Use::kAny || stream.context == current) return true;
  return use == Use::kCopy && stream.context->primary && current->primary;
}

}  // namespace

Stream::Stream(CUcontext owner, unsigned stream_flags) : context(owner), flags(stream_flags) {
  // Work that waits for another process may never be done: the process ends without it.
  std::thread([this] { run(); }).detach();
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closing_ = true;
  changed_.notify_all();
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
    if (error_of(context) == kSuccess)
      if (const CUresult result = work(); result != kSuccess) context->sticky = result;
    const std::lock_guard lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

Stream* find_stream(CUstream handle, Use use) {
  if (handle == nullptr || handle == legacy_stream() || handle == per_thread_stream()) {
    const std::lock_guard lock(g_streams_mutex);
    return handle == per_thread_stream() ? per_thread_of(current_context())
                                         : legacy_of(current_context());
  }
  const auto found = g_streams.find(handle);
  if (found == nullptr) return nullptr;
  if (is_allowed(*found->stream, use)) return found->stream;
  violation("use of a stream of another context than the current one");
  return nullptr;
}

bool is_legacy(const Stream* stream) {
  const std::lock_guard lock(g_streams_mutex);
  const auto found = g_legacy.find(stream->context);
  return found != g_legacy.end() && found->second == stream;
}

std::uint64_t enqueue(Stream* stream, Work work) {
  const std::lock_guard lock(g_streams_mutex);
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

void enqueue_behind_all(CUcontext context, Work work) {
  auto* stream = new Stream(context, kStreamNonBlocking);
  stream->add([all = all_work_of(context), work = std::move(work)] {
    for (const auto& [other, number] : all) other->wait(number);
    return work();
  });
  drain(stream);
}

void synchronize(CUcontext context) {
  for (const auto& [stream, number] : all_work_of(context)) wait_for(stream, number);
}

void synchronize_all() {
  for (CUcontext context : contexts_there()) synchronize(context);
}

void wait_for(Stream* stream, std::uint64_t number) {
  wait_until([&] { return stream->reached(number); }, spins(stream->context));
}

void forget_streams(CUcontext context) {
  for (const auto& [handle, entry] : g_streams.of(context)) {
    g_streams.remove(handle);
    entry->stream->close();
  }
  const std::lock_guard lock(g_streams_mutex);
  for (Stream* stream : streams_of(context)) stream->close();
  g_per_thread.erase(context);
  g_draining.erase(context);
  if (g_legacy.count(context) != 0) g_legacy[context]->close();
  g_legacy.erase(context);
}

SIMCUDA_API cuStreamCreate(CUstream* stream, unsigned flags) {
  Call call("cuStreamCreate");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  CUcontext context = current_context();
  *stream = g_streams.add(
      std::make_shared<StreamEntry>(StreamEntry{context, new Stream(context, flags)}));
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  return cuStreamCreate(stream, flags);
}

SIMCUDA_API cuStreamDestroy_v2(CUstream handle) {
  Call call("cuStreamDestroy");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const auto found = g_streams.find(handle);
  if (found == nullptr) return call.end(kInvalidHandle);
  abandon_capture(found->stream);
  // What it still has to do is done; nobody waits for it.
  drain(found->stream);
  g_streams.remove(handle);
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamSynchronize(CUstream handle) {
  Call call("cuStreamSynchronize");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  if (const CUresult refused = refused_look(stream)) return call.end(refused);
  // On the legacy stream this waits for the blocking streams too.
  wait_for(stream, enqueue(stream, [] { return kSuccess; }));
  return call.end(current_context()->sticky.load());
}

SIMCUDA_API cuStreamQuery(CUstream handle) {
  Call call("cuStreamQuery");
  ++activity().polls;
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  if (const CUresult refused = refused_look(stream)) return call.end(refused);
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
  Stream* stream = find_stream(handle, Use::kWork);
  if (stream == nullptr) return call.end(kInvalidHandle);
  return call.end(submit(stream, [function, data] {
    function(data);
    return kSuccess;
  }));
}

SIMCUDA_API cuStreamGetCtx(CUstream handle, CUcontext* context) {
  Call call("cuStreamGetCtx");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  *context = stream->context;
  return call.end(kSuccess);
}
