#include "capture.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "contexts.h"
#include "world.h"

using CUgraph = struct Graph*;
using CUgraphExec = struct GraphExec*;

enum class Mode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

struct Capture {
  Capture(Stream* first, Mode its_mode) : origin(first), mode(its_mode) {}

  Stream* const origin;
  const Mode mode;
  const std::thread::id thread = std::this_thread::get_id();
  bool valid = true;
  bool ended = false;
  // Those that were drawn in by an event, until the origin has waited for them.
  std::set<Stream*> forked;
  std::vector<Work> nodes;
};

struct Graph {
  std::vector<Work> nodes;
};
struct GraphExec {
  std::vector<Work> nodes;
};

namespace {

constexpr int kNone = 0;
constexpr int kActive = 1;
constexpr int kInvalidated = 2;

// Never destroyed: streams may still run when the process ends.
std::mutex& g_mutex = *new std::mutex;
auto& g_captures = *new std::map<Stream*, std::shared_ptr<Capture>>;
auto& g_graphs = *new std::set<CUgraph>;
auto& g_execs = *new std::map<CUgraphExec, std::unique_ptr<GraphExec>>;
// Mostly there is no capture, and nothing to ask.
std::atomic<int> g_under_way{0};
thread_local Mode t_mode = Mode::kGlobal;

// What the manual calls potentially unsafe: nothing of it would be in the graph.
const std::set<std::string>& unsafe_calls() {
  static const std::set<std::string> all = {
      "cuMemAlloc",
      "cuMemFree",
      "cuMemHostAlloc",
      "cuMemFreeHost",
      "cuMemHostRegister",
      "cuMemHostUnregister",
      "cuIpcOpenMemHandle",
      "cuIpcCloseMemHandle",
      "cuMemCreate",
      "cuMemRelease",
      "cuMemMap",
      "cuMemUnmap",
      "cuMemSetAccess",
      "cuMemAddressReserve",
      "cuMemAddressFree",
      "cuEventQuery",
      "cuEventSynchronize",
      "cuStreamQuery",
      "cuStreamSynchronize",
      "cuMemcpyHtoD",
      "cuMemcpyDtoH",
      "cuMemcpyDtoD",
      "cuMemsetD8",
      "cuModuleLoadData",
      "cuModuleUnload",
      "cuCtxCreate",
      "cuCtxDestroy",
  };
  return all;
}

Capture* capture_of(Stream* stream) {
  const auto found = g_captures.find(stream);
  return found == g_captures.end() ? nullptr : found->second.get();
}

CUresult spoil(Capture* capture, CUresult code) {
  capture->valid = false;
  return code;
}

// Spoils all captures that a test is true of.
template <typename Test>
CUresult spoil_if(Test test, CUresult code) {
  CUresult result = kSuccess;
  for (const auto& [stream, capture] : g_captures)
    if (test(*stream, *capture)) result = spoil(capture.get(), code);
  return result;
}

// The legacy stream would wait for such a stream, which does nothing.
bool blocks_legacy(const Stream& stream, CUcontext context) {
  return stream.context == context && (stream.flags & kStreamNonBlocking) == 0;
}

bool blocks_legacy(CUcontext context) {
  return std::any_of(g_captures.begin(), g_captures.end(),
                     [&](const auto& each) { return blocks_legacy(*each.first, context); });
}

CUresult refused_legacy(CUcontext context) {
  return spoil_if(
      [&](const Stream& stream, const Capture&) { return blocks_legacy(stream, context); },
      kCaptureImplicit);
}

CUresult refused_unsafe() {
  if (t_mode == Mode::kRelaxed) return kSuccess;
  const auto self = std::this_thread::get_id();
  return spoil_if(
      [&](const Stream&, const Capture& capture) {
        if (capture.thread == self) return capture.mode != Mode::kRelaxed;
        return t_mode == Mode::kGlobal && capture.mode == Mode::kGlobal;
      },
      kCaptureUnsupported);
}

void end(Capture* capture) {
  capture->ended = true;
  for (auto each = g_captures.begin(); each != g_captures.end();)
    each = each->second.get() == capture ? g_captures.erase(each) : std::next(each);
  g_under_way = static_cast<int>(g_captures.size());
}

CUresult run_all(const std::vector<Work>& nodes) {
  for (const Work& node : nodes)
    if (const CUresult result = node(); result != kSuccess) return result;
  return kSuccess;
}

}  // namespace

CUresult refused_by_capture(const char* call) {
  if (g_under_way.load() == 0) return kSuccess;
  const std::lock_guard lock(g_mutex);
  if (std::string(call) == "cuCtxSynchronize")
    return spoil_if(
        [](const Stream& stream, const Capture&) { return stream.context == current_context(); },
        kCaptureUnsupported);
  return unsafe_calls().count(call) == 0 ? kSuccess : refused_unsafe();
}

CUresult submit(Stream* stream, Work work, std::uint64_t* number) {
  if (g_under_way.load() != 0) {
    const std::lock_guard lock(g_mutex);
    if (Capture* capture = capture_of(stream)) {
      if (!capture->valid) return kCaptureInvalidated;
      capture->nodes.push_back(std::move(work));
      return kSuccess;
    }
    if (is_legacy(stream))
      if (const CUresult refused = refused_legacy(stream->context)) return refused;
  }
  const std::uint64_t added = enqueue(stream, std::move(work));
  if (number != nullptr) *number = added;
  return kSuccess;
}

CUresult refused_look(Stream* stream) {
  if (g_under_way.load() == 0) return kSuccess;
  const std::lock_guard lock(g_mutex);
  if (Capture* capture = capture_of(stream)) return spoil(capture, kCaptureUnsupported);
  return is_legacy(stream) ? refused_legacy(stream->context) : kSuccess;
}

CUresult refused_look(CUcontext context) {
  if (g_under_way.load() == 0) return kSuccess;
  const std::lock_guard lock(g_mutex);
  return spoil_if([&](const Stream& stream, const Capture&) { return stream.context == context; },
                  kCaptureUnsupported);
}

CUresult refused_pageable(Stream* stream) {
  if (g_under_way.load() == 0) return kSuccess;
  const std::lock_guard lock(g_mutex);
  if (Capture* capture = capture_of(stream)) return spoil(capture, kCaptureUnsupported);
  return refused_unsafe();
}

void abandon_capture(Stream* stream) {
  const std::lock_guard lock(g_mutex);
  const auto found = g_captures.find(stream);
  if (found == g_captures.end()) return;
  found->second->valid = false;
  if (found->second->origin == stream) return end(found->second.get());
  g_captures.erase(found);
  g_under_way = static_cast<int>(g_captures.size());
}

// -- events
// -----------------------------------------------------------------------------------------

CUresult mark_capture(Stream* stream, CaptureMark* mark) {
  *mark = {};
  if (g_under_way.load() == 0) return kSuccess;
  const std::lock_guard lock(g_mutex);
  const auto found = g_captures.find(stream);
  if (found == g_captures.end())
    return is_legacy(stream) ? refused_legacy(stream->context) : kSuccess;
  if (!found->second->valid) return kCaptureInvalidated;
  *mark = {found->second, stream};
  return kSuccess;
}

CUresult wait_in_capture(Stream* stream, const CaptureMark& mark, bool recorded, bool* done) {
  *done = true;
  const std::lock_guard lock(g_mutex);
  Capture* own = capture_of(stream);
  Capture* theirs = mark.capture.get();
  if (own != nullptr && !own->valid) return kCaptureInvalidated;
  if (theirs == nullptr) {
    *done = own != nullptr && !recorded;
    return own == nullptr || !recorded ? kSuccess : spoil(own, kCaptureIsolation);
  }
  if (theirs->ended) return own == nullptr ? kCaptureIsolation : spoil(own, kCaptureIsolation);
  if (!theirs->valid) return kCaptureInvalidated;
  if (own != nullptr && own != theirs) return spoil(theirs, spoil(own, kCaptureMerge));
  if (is_legacy(stream)) return spoil(theirs, kCaptureImplicit);
  if (own == theirs) {
    if (mark.stream != stream) theirs->forked.erase(mark.stream);
    return kSuccess;
  }
  g_captures[stream] = mark.capture;
  theirs->forked.insert(stream);
  g_under_way = static_cast<int>(g_captures.size());
  return kSuccess;
}

CUresult refused_look(const CaptureMark& mark) {
  if (mark.capture == nullptr) return kSuccess;
  const std::lock_guard lock(g_mutex);
  return spoil(mark.capture.get(), kCapturedEvent);
}

// -- calls
// ------------------------------------------------------------------------------------------

SIMCUDA_API cuThreadExchangeStreamCaptureMode(int* mode) {
  Call call("cuThreadExchangeStreamCaptureMode");
  if (const CUresult fault = call.with(*mode).begin(false)) return call.end(fault);
  if (*mode < 0 || *mode > 2) return call.end(kInvalidValue);
  *mode = static_cast<int>(std::exchange(t_mode, static_cast<Mode>(*mode)));
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamBeginCapture_v2(CUstream handle, int mode) {
  Call call("cuStreamBeginCapture");
  if (const CUresult fault = call.with(mode).begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  if (mode < 0 || mode > 2) return call.end(kInvalidValue);
  if (is_legacy(stream)) return call.end(kCaptureUnsupported);
  const std::lock_guard lock(g_mutex);
  if (capture_of(stream) != nullptr) return call.end(kIllegalState);
  g_captures[stream] = std::make_shared<Capture>(stream, static_cast<Mode>(mode));
  g_under_way = static_cast<int>(g_captures.size());
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  Call call("cuStreamEndCapture");
  *graph = nullptr;
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  const std::lock_guard lock(g_mutex);
  const auto found = g_captures.find(stream);
  if (found == g_captures.end()) return call.end(kIllegalState);
  const std::shared_ptr<Capture> capture = found->second;
  if (capture->origin != stream) return call.end(spoil(capture.get(), kCaptureUnmatched));
  if (capture->mode != Mode::kRelaxed && capture->thread != std::this_thread::get_id())
    return call.end(spoil(capture.get(), kCaptureWrongThread));
  end(capture.get());
  if (!capture->valid) return call.end(kCaptureInvalidated);
  if (!capture->forked.empty()) return call.end(kCaptureUnjoined);
  *graph = new Graph{std::move(capture->nodes)};
  g_graphs.insert(*graph);
  return call.end(kSuccess);
}

SIMCUDA_API cuStreamIsCapturing(CUstream handle, int* status) {
  Call call("cuStreamIsCapturing");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return call.end(kInvalidHandle);
  const std::lock_guard lock(g_mutex);
  const Capture* capture = capture_of(stream);
  *status = capture == nullptr ? kNone : capture->valid ? kActive : kInvalidated;
  // To ask spoils nothing.
  const bool unusable = capture == nullptr && is_legacy(stream) && blocks_legacy(stream->context);
  return call.end(unusable ? kCaptureImplicit : kSuccess);
}

// -- graphs
// -----------------------------------------------------------------------------------------

SIMCUDA_API cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph,
                                        unsigned long long flags) {
  Call call("cuGraphInstantiate");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  const std::lock_guard lock(g_mutex);
  if (g_graphs.count(graph) == 0) return call.end(kInvalidValue);
  auto made = std::make_unique<GraphExec>(GraphExec{graph->nodes});
  *exec = made.get();
  g_execs.emplace(made.get(), std::move(made));
  return call.end(kSuccess);
}

SIMCUDA_API cuGraphLaunch(CUgraphExec exec, CUstream handle) {
  Call call("cuGraphLaunch");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle, Use::kWork);
  if (stream == nullptr) return call.end(kInvalidHandle);
  std::vector<Work> nodes;
  {
    const std::lock_guard lock(g_mutex);
    if (g_execs.count(exec) == 0) return call.end(kInvalidValue);
    nodes = exec->nodes;
  }
  return call.end(submit(stream, [nodes = std::move(nodes)] { return run_all(nodes); }));
}

SIMCUDA_API cuGraphExecDestroy(CUgraphExec exec) {
  Call call("cuGraphExecDestroy");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const std::lock_guard lock(g_mutex);
  return call.end(g_execs.erase(exec) == 1 ? kSuccess : kInvalidValue);
}

SIMCUDA_API cuGraphDestroy(CUgraph graph) {
  Call call("cuGraphDestroy");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const std::lock_guard lock(g_mutex);
  if (g_graphs.erase(graph) == 0) return call.end(kInvalidValue);
  delete graph;
  return call.end(kSuccess);
}
