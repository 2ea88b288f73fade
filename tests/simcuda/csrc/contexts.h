// Devices, and the primary context that each process has on each.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "driver_types.h"

struct Context {
  explicit Context(CUdevice ordinal, int physical_device)
      : device(ordinal), physical(physical_device) {}

  const CUdevice device;
  // Which device it is on the machine, whatever CUDA_VISIBLE_DEVICES calls it.
  const int physical;
  std::atomic<int> retained{0};
  // After an illegal access every call fails with this, as on a real device.
  std::atomic<CUresult> sticky{kSuccess};
};

bool initialized();
CUcontext current_context();
// The context of a device that this process sees, whether it is retained or not; else null.
CUcontext context_of(CUdevice ordinal);
CUcontext context_of_physical(int physical);
int visible_devices();
CUuuid uuid_of(int physical);
// Makes a context current for as long as this lives, on a thread of ours.
class Current {
 public:
  explicit Current(CUcontext context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};
