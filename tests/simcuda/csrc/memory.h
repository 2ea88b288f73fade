// Allocations of device memory, one's own and those of other processes that are open.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver_types.h"

// Returns the host's address of device memory when work runs, or null after noting what is wrong.
void* resolve(CUdeviceptr pointer, std::size_t nbytes, const char* what);
// The same for what a kernel does: it reaches memory of its own context, and of that one's peers.
void* resolve_in_kernel(CUdeviceptr pointer, std::size_t nbytes, const char* what);
// Whether a copy may read or write memory of the host while it runs.
bool is_pinned(const void* pointer, std::size_t nbytes);
// Whether a range is pinned in part, or by several registrations: the driver copies no such range.
bool is_partly_pinned(const void* pointer, std::size_t nbytes);

// What a handle says of an allocation: where it lies in a block of its process.
struct Exported {
  std::int32_t exporter;
  std::int32_t physical;
  std::uint64_t block;
  std::uint64_t block_bytes;
  std::uint64_t offset;
  std::uint64_t nbytes;
};
CUresult export_allocation(CUdeviceptr pointer, Exported* exported);
CUresult open_allocation(const Exported& exported, CUdeviceptr* pointer);
CUresult close_allocation(CUdeviceptr pointer);
// Frees and closes all that a context has, which goes.
void forget_all(CUcontext context);
