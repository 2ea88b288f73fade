// Blocks: files of the machine that are device memory. A process maps a block where no device
// pointer points to. Whoever has a block keeps its file locked, which ends with the process however
// that ends: without a lock it is free.
#pragma once

#include <cstddef>
#include <string>

#include "driver_types.h"

constexpr std::size_t kBlock = std::size_t{2} << 20U;

// Addresses that nothing is mapped at, and that are never given twice.
CUdeviceptr new_address(std::size_t nbytes);
// Counts memory of a device as used; false when it has not so much left.
bool take_room(int physical, std::size_t nbytes);
// Makes a file of device memory, locked; its descriptor, or -1.
int make_file(const std::string& name, std::size_t nbytes);
// Opens one, and locks it if it is to be `kept`; its descriptor, or -1.
int open_file(const std::string& name, bool kept);
// Maps part of one; null if that cannot be.
char* map_file(int descriptor, std::size_t offset, std::size_t nbytes);
// Frees a file that nobody has any more.
void reap_file(const std::string& name);
