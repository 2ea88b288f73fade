// The pool of a device: nothing is allocated from it, but what is set of it is in the record.
#include "contexts.h"
#include "world.h"

using CUmemoryPool = struct MemoryPool*;

struct MemoryPool {
  CUdevice device;
};

SIMCUDA_API cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  Call call("cuDeviceGetDefaultMemPool");
  if (const CUresult fault = call.with(device).begin(false)) return call.end(fault);
  static MemoryPool pools[kDevices] = {{0}, {1}};
  if (context_of(device) == nullptr) return call.end(kInvalidDevice);
  *pool = &pools[device];
  return call.end(kSuccess);
}

SIMCUDA_API cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void* value) {
  Call call("cuMemPoolSetAttribute");
  if (pool == nullptr || value == nullptr) return call.end(kInvalidValue);
  call.with(pool->device).with(attribute).with(*static_cast<std::uint64_t*>(value));
  if (const CUresult fault = call.begin(false)) return call.end(fault);
  return call.end(kSuccess);
}
