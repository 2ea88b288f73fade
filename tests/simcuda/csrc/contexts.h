// Devices, and the contexts that a process has on them.
#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "driver_types.h"

struct Context {
  Context(CUdevice ordinal, int physical_device, bool is_primary)
      : device(ordinal), physical(physical_device), primary(is_primary) {}

  const CUdevice device;
  // Which device it is on the machine, whatever CUDA_VISIBLE_DEVICES calls it.
  const int physical;
  const bool primary;
  // 0: it is not there. One that is not primary is there from its creation to its destruction.
  std::atomic<int> retained{0};
  std::atomic<unsigned> flags{0};
  // After an illegal access every call fails with this, as on a real device.
  std::atomic<CUresult> sticky{kSuccess};
  // The contexts whose memory its kernels reach.
  std::mutex mutex;
  std::set<CUcontext> peers;
  // The file of the machine that says that it is there, and the descriptor of its memory's.
  std::string name;
  int memory = -1;
};

// What all calls in a context fail with, or success.
CUresult error_of(CUcontext context);
bool initialized();
CUcontext current_context();
// The primary context of a device that this process sees, whether it is retained or not; else null.
CUcontext context_of(CUdevice ordinal);
CUcontext context_of_physical(int physical);
// The contexts of this process that are there.
std::vector<CUcontext> contexts_there();
int visible_devices();
CUuuid uuid_of(int physical);
// Whether kernels of a context may use memory of another one.
bool reaches(CUcontext context, CUcontext other);

// Makes a context current for as long as this lives, on a thread of ours.
class Current {
 public:
  explicit Current(CUcontext context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};
