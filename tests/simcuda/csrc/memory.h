// Device memory: files of the machine, mapped where no device pointer points to.
#pragma once

#include <cstddef>
#include <string>

#include "driver_types.h"

// Returns the host's address of device memory when work runs, or null after noting what is wrong.
void* resolve(CUdeviceptr pointer, std::size_t nbytes, const char* what);
// The same for what a kernel does: it reaches memory of its own context, and of that one's peers.
void* resolve_in_kernel(CUdeviceptr pointer, std::size_t nbytes, const char* what);
// Addresses that nothing is mapped at, and that are never given twice.
CUdeviceptr new_address(std::size_t nbytes);
// Counts memory of a device as used; false when it has not so much left.
bool take_room(int physical, std::size_t nbytes);
// Whether a copy may read or write memory of the host while it runs.
bool is_pinned(const void* pointer, std::size_t nbytes);

// Whether a range is pinned in part, or by several registrations: the driver copies no such range.
bool is_partly_pinned(const void* pointer, std::size_t nbytes);

// The allocation that a handle of another process means, for `cuIpcOpenMemHandle`.
CUresult open_allocation(const std::string& name, int physical, std::size_t nbytes, int exporter,
                         CUdeviceptr* pointer);
CUresult close_allocation(CUdeviceptr pointer);
// Frees and closes all that a context has, which goes.
void forget_all(CUcontext context);
// Describes an allocation of this process for others.
struct Exported {
  std::string name;
  int physical;
  std::size_t nbytes;
};
CUresult describe(CUdeviceptr pointer, Exported* exported);
