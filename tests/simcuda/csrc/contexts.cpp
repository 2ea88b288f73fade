#include "contexts.h"

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "memory.h"
#include "streams.h"
#include "world.h"

namespace {

std::atomic<bool> g_initialized{false};
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

std::vector<std::unique_ptr<Context>>& contexts() {
  // Never destroyed: streams may still run when the process ends.
  static auto& all = *new std::vector<std::unique_ptr<Context>>([] {
    std::vector<std::unique_ptr<Context>> made;
    for (const int physical : visible())
      made.push_back(std::make_unique<Context>(static_cast<int>(made.size()), physical));
    return made;
  }());
  return all;
}

}  // namespace

bool initialized() { return g_initialized.load(); }

CUcontext current_context() { return t_stack.empty() ? nullptr : t_stack.back(); }

int visible_devices() { return static_cast<int>(contexts().size()); }

CUcontext context_of(CUdevice ordinal) {
  return ordinal < 0 || ordinal >= visible_devices() ? nullptr : contexts()[ordinal].get();
}

CUcontext context_of_physical(int physical) {
  for (const auto& context : contexts())
    if (context->physical == physical) return context.get();
  return nullptr;
}

CUuuid uuid_of(int physical) {
  CUuuid uuid{};
  for (int place = 0; place < 16; ++place) uuid.bytes[place] = static_cast<char>(0xA0 + place);
  uuid.bytes[15] = static_cast<char>(physical);
  return uuid;
}

Current::Current(CUcontext context) { t_stack.push_back(context); }
Current::~Current() { t_stack.pop_back(); }

SIMCUDA_API cuInit(unsigned flags) {
  g_initialized = true;
  Call call("cuInit");
  if (const CUresult fault = call.with(flags).begin(false)) {
    g_initialized = false;
    return call.end(fault);
  }
  if (visible_devices() == 0) return call.end(100);  // CUDA_ERROR_NO_DEVICE
  return call.end(kSuccess);
}

SIMCUDA_API cuDriverGetVersion(int* version) {
  *version = 12090;
  return kSuccess;
}

SIMCUDA_API cuDeviceGetCount(int* count) {
  Call call("cuDeviceGetCount");
  if (const CUresult fault = call.begin(false)) return call.end(fault);
  *count = visible_devices();
  return call.end(kSuccess);
}

SIMCUDA_API cuDeviceGet(CUdevice* device, int ordinal) {
  Call call("cuDeviceGet");
  if (const CUresult fault = call.with(ordinal).begin(false)) return call.end(fault);
  if (context_of(ordinal) == nullptr) return call.end(kInvalidDevice);
  *device = ordinal;
  return call.end(kSuccess);
}

SIMCUDA_API cuDeviceGetName(char* name, int length, CUdevice device) {
  Call call("cuDeviceGetName");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  const std::string text = "Simulated device " + std::to_string(context_of(device)->physical);
  std::strncpy(name, text.c_str(), static_cast<std::size_t>(length));
  return call.end(kSuccess);
}

SIMCUDA_API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  Call call("cuDeviceGetUuid");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  *uuid = uuid_of(context_of(device)->physical);
  return call.end(kSuccess);
}

SIMCUDA_API cuDeviceTotalMem_v2(std::size_t* nbytes, CUdevice device) {
  Call call("cuDeviceTotalMem");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  *nbytes = control().memory_bytes;
  return call.end(kSuccess);
}

SIMCUDA_API cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  Call call("cuDeviceGetAttribute");
  if (const CUresult fault = call.with(attribute).with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  // Unified addressing, compute capability 9.0, the compute mode, virtual memory and descriptors of
  // it; nothing else is there.
  const int mode = static_cast<int>(control().compute_mode);
  const int fds = control().without_fds == 0 ? 1 : 0;
  *value = attribute == 41 || attribute == 102 ? 1
           : attribute == 75                   ? 9
           : attribute == 20                   ? mode
           : attribute == 103                  ? fds
                                               : 0;
  return call.end(kSuccess);
}

SIMCUDA_API cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  Call call("cuDeviceCanAccessPeer");
  if (const CUresult fault = call.with(device).with(peer).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr || context_of(peer) == nullptr) return call.end(kInvalidDevice);
  *can = device != peer && control().peer_access != 0;
  return call.end(kSuccess);
}

SIMCUDA_API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Call call("cuDevicePrimaryCtxRetain");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  *context = context_of(device);
  ++(*context)->retained;
  return call.end(kSuccess);
}

SIMCUDA_API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  Call call("cuDevicePrimaryCtxRelease");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  const int before = context_of(device)->retained.fetch_sub(1);
  if (before == 1) {
    // With the last one that retained it, all that was made in it goes.
    synchronize(context_of(device));
    forget_all(context_of(device));
  }
  if (before > 0) return call.end(kSuccess);
  ++context_of(device)->retained;
  violation("cuDevicePrimaryCtxRelease of a context that is not retained");
  return call.end(kInvalidContext);
}

SIMCUDA_API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  Call call("cuDevicePrimaryCtxGetState");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  *flags = 0;
  *active = context_of(device)->retained.load() > 0 ? 1 : 0;
  return call.end(kSuccess);
}

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
  synchronize(current_context());
  return call.end(current_context()->sticky.load());
}

SIMCUDA_API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  Call call("cuCtxEnablePeerAccess");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  if (control().peer_access == 0 || peer == current_context()) return call.end(217);  // unsupported
  return call.end(kSuccess);
}
