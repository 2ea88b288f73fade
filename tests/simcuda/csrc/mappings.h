// Physical memory, the address ranges it is mapped at, and the descriptors by which it crosses
// processes.
#pragma once

#include <cstddef>
#include <string>

#include "driver_types.h"

// As `resolve` of memory.h, for what is no allocation; `where` begins what is noted of a fault.
void* resolve_mapping(CUdeviceptr pointer, std::size_t nbytes, const std::string& where);
// Describes the mapping that an address lies in; false if it lies in none.
struct Mapped {
  CUdeviceptr base;
  std::size_t nbytes;
  int physical;
};
bool find_mapping(CUdeviceptr pointer, Mapped* mapped);
// Notes what of a context that goes is still mapped, or reserved when it is the last.
void note_left_mappings(CUcontext context);
