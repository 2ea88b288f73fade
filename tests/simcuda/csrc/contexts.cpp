#include "contexts.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <sstream>
#include <vector>

#include "blocks.h"
#include "capture.h"
#include "driver_lock.h"
#include "events.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"
#include "world.h"

namespace {

// The process that has called cuInit; a child that it forks is another one.
std::atomic<pid_t> g_initialized_by{0};
std::atomic<int> g_count{0};
// Those that are not primary. Never freed: a handle of one must not be that of another one.
std::mutex& g_contexts_mutex = *new std::mutex;
auto& g_created = *new std::vector<CUcontext>;
thread_local std::vector<CUcontext> t_stack;

std::vector<int> visible() {
  const int devices = static_cast<int>(control().devices);
  std::vector<int> found;
  const char* wanted = std::getenv("CUDA_VISIBLE_DEVICES");
  if (wanted == nullptr) {
    for (int device = 0; device < devices; ++device) found.push_back(device);
    return found;
  }
  std::stringstream list(wanted);
  for (std::string item; std::getline(list, item, ',');) {
    // The first that is none ends the list, as the real driver has it.
    char* end = nullptr;
    const long device = std::strtol(item.c_str(), &end, 10);
    if (end == item.c_str() || device < 0 || device >= devices) break;
    found.push_back(static_cast<int>(device));
  }
  return found;
}

std::vector<std::unique_ptr<Context>>& primary_contexts() {
  // Never destroyed: streams may still run when the process ends.
  static auto& all = *new std::vector<std::unique_ptr<Context>>([] {
    std::vector<std::unique_ptr<Context>> made;
    for (const int physical : visible())
      made.push_back(std::make_unique<Context>(static_cast<int>(made.size()), physical, true));
    return made;
  }());
  return all;
}

// A context is there from now on, unless there is no memory for it. Its file counts it:
// `context-PID-NUMBER-DEVICE`; another one is its memory.
CUresult begin_context(CUcontext context) {
  if (settings().lost_device == context->physical) return kUnknown;
  const std::string number = std::to_string(getpid()) + "-context" + std::to_string(++g_count) +
                             "-" + std::to_string(context->physical);
  spend(settings().context_us);
  if (const auto nbytes = static_cast<std::size_t>(settings().context_mib) << 20U) {
    if (!take_room(context->physical, nbytes)) return kOutOfMemory;
    context->memory = make_file("memory-" + number, nbytes);
  }
  context->name = "context-" + number;
  close(open(world_path(context->name).c_str(), O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  return kSuccess;
}

// A context is there no more, nor anything that was made in it.
void end_context(CUcontext context) {
  synchronize(context);
  forget_streams(context);
  forget_events(context);
  forget_all(context);
  {
    const std::lock_guard lock(context->mutex);
    context->peers.clear();
  }
  context->flags = 0;
  unlink(world_path(context->name).c_str());
  if (context->memory < 0) return;
  close(context->memory);
  context->memory = -1;
  reap_file("memory" + context->name.substr(context->name.find('-')));
}

CUresult create_context(CUcontext* context, unsigned flags, CUdevice device) {
  Call call("cuCtxCreate");
  if (const CUresult fault = call.with(flags).with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  auto* made = new Context(device, context_of(device)->physical, false);
  if (const CUresult refused = begin_context(made)) return call.end(refused);
  made->retained = 1;
  made->flags = flags;
  {
    const std::lock_guard lock(g_contexts_mutex);
    g_created.push_back(made);
  }
  t_stack.push_back(made);
  *context = made;
  return call.end(kSuccess);
}

}  // namespace

CUresult error_of(CUcontext context) {
  if (settings().lost_device == context->physical) context->sticky = kUnknown;
  return context->sticky.load();
}

bool initialized() { return g_initialized_by.load() == getpid(); }

CUcontext current_context() { return t_stack.empty() ? nullptr : t_stack.back(); }

int visible_devices() { return static_cast<int>(primary_contexts().size()); }

CUcontext context_of(CUdevice ordinal) {
  return ordinal < 0 || ordinal >= visible_devices() ? nullptr : primary_contexts()[ordinal].get();
}

CUcontext context_of_physical(int physical) {
  for (const auto& context : primary_contexts())
    if (context->physical == physical) return context.get();
  return nullptr;
}

std::vector<CUcontext> contexts_there() {
  std::vector<CUcontext> found;
  for (const auto& context : primary_contexts())
    if (context->retained.load() != 0) found.push_back(context.get());
  const std::lock_guard lock(g_contexts_mutex);
  for (CUcontext context : g_created)
    if (context->retained.load() != 0) found.push_back(context);
  return found;
}

bool reaches(CUcontext context, CUcontext other) {
  if (context == other) return true;
  const std::lock_guard lock(context->mutex);
  return context->peers.count(other) != 0;
}

Current::Current(CUcontext context) { t_stack.push_back(context); }
Current::~Current() { t_stack.pop_back(); }

SIMCUDA_API cuInit(unsigned flags) {
  Call call("cuInit");
  pid_t nobody = 0;
  const bool first = g_initialized_by.compare_exchange_strong(nobody, getpid());
  if (const CUresult fault = call.with(flags).begin(false)) {
    if (first) g_initialized_by = 0;
    return call.end(fault);
  }
  check_settings();
  if (visible_devices() == 0) return call.end(100);  // CUDA_ERROR_NO_DEVICE
  return call.end(kSuccess);
}

// -- primary contexts -----------------------------------------------------------------------------

SIMCUDA_API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Call call("cuDevicePrimaryCtxRetain");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  *context = context_of(device);
  if ((*context)->retained++ > 0) return call.end(kSuccess);
  const CUresult refused = begin_context(*context);
  if (refused != kSuccess) (*context)->retained = 0;
  return call.end(refused);
}

SIMCUDA_API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  Call call("cuDevicePrimaryCtxRelease");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  const int before = context_of(device)->retained.fetch_sub(1);
  if (before == 1) end_context(context_of(device));
  if (before > 0) return call.end(kSuccess);
  ++context_of(device)->retained;
  violation("cuDevicePrimaryCtxRelease of a context that is not retained");
  return call.end(kInvalidContext);
}

SIMCUDA_API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  Call call("cuDevicePrimaryCtxGetState");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  *flags = context_of(device)->flags.load();
  *active = context_of(device)->retained.load() > 0 ? 1 : 0;
  return call.end(kSuccess);
}

SIMCUDA_API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  Call call("cuDevicePrimaryCtxSetFlags");
  if (const CUresult fault = call.with(device).with(flags).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  context_of(device)->flags = flags;
  return call.end(kSuccess);
}

// -- other contexts -------------------------------------------------------------------------------

// The forms of cuCtxCreate; `cuGetProcAddress` chooses by the release that is asked for.
SIMCUDA_API cuCtxCreate_v2(CUcontext* context, unsigned flags, CUdevice device) {
  return create_context(context, flags, device);
}

SIMCUDA_API cuCtxCreate_v3(CUcontext* context, void*, int, unsigned flags, CUdevice device) {
  return create_context(context, flags, device);
}

SIMCUDA_API cuCtxCreate_v4(CUcontext* context, void*, unsigned flags, CUdevice device) {
  return create_context(context, flags, device);
}

SIMCUDA_API cuCtxDestroy_v2(CUcontext context) {
  Call call("cuCtxDestroy");
  if (const CUresult fault = call.begin(false)) return call.end(fault);
  if (context == nullptr || context->primary || context->retained.exchange(0) == 0) {
    violation("cuCtxDestroy of what is no context, was destroyed, or is a primary one");
    return call.end(kInvalidContext);
  }
  end_context(context);
  if (current_context() == context) t_stack.pop_back();
  return call.end(kSuccess);
}

// -- the current context --------------------------------------------------------------------------

SIMCUDA_API cuCtxSetCurrent(CUcontext context) {
  Call call("cuCtxSetCurrent");
  if (const CUresult fault = call.begin(false)) return call.end(fault);
  if (!t_stack.empty()) t_stack.pop_back();
  if (context != nullptr) t_stack.push_back(context);
  return call.end(kSuccess);
}

SIMCUDA_API cuCtxGetCurrent(CUcontext* context) {
  Call call("cuCtxGetCurrent");
  if (const CUresult fault = call.begin(false)) return call.end(fault);
  *context = current_context();
  return call.end(kSuccess);
}

SIMCUDA_API cuCtxPushCurrent_v2(CUcontext context) {
  Call call("cuCtxPushCurrent");
  if (const CUresult fault = call.begin(false)) return call.end(fault);
  if (context == nullptr) return call.end(kInvalidContext);
  t_stack.push_back(context);
  return call.end(kSuccess);
}

SIMCUDA_API cuCtxPopCurrent_v2(CUcontext* context) {
  Call call("cuCtxPopCurrent");
  if (const CUresult fault = call.begin(false)) return call.end(fault);
  if (t_stack.empty()) return call.end(kInvalidContext);
  if (context != nullptr) *context = t_stack.back();
  t_stack.pop_back();
  return call.end(kSuccess);
}

SIMCUDA_API cuCtxGetDevice(CUdevice* device) {
  Call call("cuCtxGetDevice");
  if (const CUresult fault = call.begin()) return call.end(fault);
  *device = current_context()->device;
  return call.end(kSuccess);
}

SIMCUDA_API cuCtxSynchronize() {
  Call call("cuCtxSynchronize");
  if (const CUresult fault = call.begin()) return call.end(fault);
  if (const CUresult refused = refused_look(current_context())) return call.end(refused);
  synchronize(current_context());
  return call.end(current_context()->sticky.load());
}

// -- contexts that reach each other's memory ------------------------------------------------------

SIMCUDA_API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  Call call("cuCtxEnablePeerAccess");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  CUcontext context = current_context();
  if (peer == nullptr || peer->retained.load() == 0) return call.end(kInvalidContext);
  if (peer == context || (peer->physical != context->physical && control().peer_access == 0))
    return call.end(217);  // CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
  const std::lock_guard lock(context->mutex);
  return call.end(context->peers.insert(peer).second ? kSuccess : kPeerAccessAlreadyEnabled);
}

SIMCUDA_API cuCtxDisablePeerAccess(CUcontext peer) {
  Call call("cuCtxDisablePeerAccess");
  if (const CUresult fault = call.begin()) return call.end(fault);
  CUcontext context = current_context();
  const std::lock_guard lock(context->mutex);
  return call.end(context->peers.erase(peer) == 1 ? kSuccess : kPeerAccessNotEnabled);
}
