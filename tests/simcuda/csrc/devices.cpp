// What devices there are, and what is said of them; none of it needs a context.
#include <cstring>
#include <string>

#include "contexts.h"
#include "settings.h"
#include "world.h"

CUuuid uuid_of(int physical) {
  CUuuid uuid{};
  for (int place = 0; place < 16; ++place) uuid.bytes[place] = static_cast<char>(0xA0 + place);
  uuid.bytes[15] = static_cast<char>(physical);
  return uuid;
}

SIMCUDA_API cuDriverGetVersion(int* version) {
  *version = settings().driver_version;
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
  // Unified addressing, the compute capability, the compute mode, virtual memory and descriptors of
  // it; nothing else is there.
  const int mode = static_cast<int>(control().compute_mode);
  const int fds = control().without_fds == 0 ? 1 : 0;
  *value = attribute == 41 || attribute == 102 ? 1
           : attribute == 75                   ? settings().architecture / 10
           : attribute == 76                   ? settings().architecture % 10
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
