// Memory handles: 64 bytes that name an allocation and who made it.
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
  Exported exported;
  char padding[16];
};
static_assert(sizeof(Handle) == sizeof(CUipcMemHandle));
constexpr char kMagic[8] = {'s', 'i', 'm', 'c', 'u', 'd', 'a', '1'};

}  // namespace

SIMCUDA_API cuIpcGetMemHandle(CUipcMemHandle* ipc, CUdeviceptr pointer) {
  Call call("cuIpcGetMemHandle");
  if (const CUresult fault = call.begin()) return call.end(fault);
  Handle handle{};
  std::memcpy(handle.magic, kMagic, sizeof kMagic);
  if (const CUresult result = export_allocation(pointer, &handle.exported)) return call.end(result);
  std::memcpy(ipc, &handle, sizeof handle);
  return call.end(kSuccess);
}

SIMCUDA_API cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle ipc, unsigned flags) {
  Call call("cuIpcOpenMemHandle");
  if (const CUresult fault = call.with(flags).begin()) return call.end(fault);
  Handle handle{};
  std::memcpy(&handle, &ipc, sizeof handle);
  if (std::memcmp(handle.magic, kMagic, sizeof kMagic) != 0 || flags != 1)
    return call.end(kInvalidValue);
  if (handle.exported.exporter == getpid()) return call.end(kInvalidContext);
  if (handle.exported.physical != current_context()->physical && control().peer_access == 0)
    return call.end(kInvalidDevice);
  if (const CUresult refused = refused_opening("handles")) return call.end(refused);
  spend(settings().open_us);
  return call.end(open_allocation(handle.exported, pointer));
}

SIMCUDA_API cuIpcCloseMemHandle(CUdeviceptr pointer) {
  Call call("cuIpcCloseMemHandle");
  if (const CUresult fault = call.begin()) return call.end(fault);
  // As on a real device this waits for all that the process has under way.
  synchronize_all();
  spend(settings().close_us);
  return call.end(close_allocation(pointer));
}
