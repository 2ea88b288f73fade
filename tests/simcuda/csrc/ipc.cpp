// Memory handles: 64 bytes that name an allocation, its device and who made it.
#include <unistd.h>

#include <cstring>

#include "contexts.h"
#include "driver_lock.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"
#include "world.h"

namespace {

struct Handle {
  char magic[8];
  std::int32_t exporter;
  std::int32_t physical;
  std::uint64_t nbytes;
  char name[40];
};
static_assert(sizeof(Handle) == sizeof(CUipcMemHandle));
constexpr char kMagic[8] = {'s', 'i', 'm', 'c', 'u', 'd', 'a', '1'};

}  // namespace

SIMCUDA_API cuIpcGetMemHandle(CUipcMemHandle* ipc, CUdeviceptr pointer) {
  Call call("cuIpcGetMemHandle");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Exported exported;
  if (const CUresult result = describe(pointer, &exported)) return call.end(result);
  Handle handle{};
  std::memcpy(handle.magic, kMagic, sizeof kMagic);
  handle.exporter = getpid();
  handle.physical = exported.physical;
  handle.nbytes = exported.nbytes;
  std::strncpy(handle.name, exported.name.c_str(), sizeof handle.name - 1);
  std::memcpy(ipc, &handle, sizeof handle);
  return call.end(kSuccess);
}

SIMCUDA_API cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle ipc, unsigned flags) {
  Call call("cuIpcOpenMemHandle");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  Handle handle{};
  std::memcpy(&handle, &ipc, sizeof handle);
  handle.name[sizeof handle.name - 1] = 0;
  if (std::memcmp(handle.magic, kMagic, sizeof kMagic) != 0 || flags != 1 ||
      std::strncmp(handle.name, "memory-", 7) != 0 || std::strchr(handle.name, '/') != nullptr)
    return call.end(kInvalidValue);
  if (handle.exporter == getpid()) return call.end(kInvalidContext);
  if (handle.physical != current_context()->physical && control().peer_access == 0)
    return call.end(kInvalidDevice);
  spend(settings().open_us);
  return call.end(
      open_allocation(handle.name, handle.physical, handle.nbytes, handle.exporter, pointer));
}

SIMCUDA_API cuIpcCloseMemHandle(CUdeviceptr pointer) {
  Call call("cuIpcCloseMemHandle");
  if (const CUresult fault = call.begin()) return call.end(fault);
  // As on a real device this waits for all that the process has under way.
  synchronize_all();
  spend(settings().close_us);
  return call.end(close_allocation(pointer));
}
