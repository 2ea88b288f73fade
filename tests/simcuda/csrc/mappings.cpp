// Physical memory is a block. Each handle, each mapping and each descriptor of it keeps that.
#include "mappings.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <set>

#include "blocks.h"
#include "contexts.h"
#include "driver_lock.h"
#include "memory.h"
#include "settings.h"
#include "world.h"

namespace {

const std::string kPrefix = "physical-";

struct Physical {
  std::string name;
  int descriptor;
  std::size_t nbytes;
  int physical;
};

struct Mapping {
  Physical memory;
  char* host;
  std::size_t nbytes;
  // The devices that may read and write here.
  std::set<int> allowed;
};

// Never destroyed: streams may still run when the process ends.
std::mutex& g_mappings_mutex = *new std::mutex;
auto& g_handles = *new std::map<CUmemGenericAllocationHandle, Physical>;
auto& g_ranges = *new std::map<CUdeviceptr, std::size_t>;
auto& g_mappings = *new std::map<CUdeviceptr, Mapping>;
std::uint64_t g_mapping_count = 0;

bool is_granular(std::size_t nbytes) { return nbytes != 0 && nbytes % kBlock == 0; }

// What is kept of physical memory goes; with the last, the memory.
void let_go(const Physical& memory) {
  close(memory.descriptor);
  reap_file(memory.name);
}

template <typename Map>
auto containing(Map& map, CUdeviceptr pointer) {
  auto after = map.upper_bound(pointer);
  return after == map.begin() ? map.end() : --after;
}

CUmemGenericAllocationHandle new_handle(Physical memory) {
  const CUmemGenericAllocationHandle handle = 0x5100000000 + ++g_mapping_count;
  g_handles[handle] = std::move(memory);
  return handle;
}

CUresult check(const CUmemAllocationProp* prop) {
  if (prop->type != kMemoryPinned || prop->location.type != kMemoryOnDevice) return kInvalidValue;
  if (context_of(prop->location.id) == nullptr) return kInvalidDevice;
  if (prop->requested_handle_types != 0 && prop->requested_handle_types != kPosixFileDescriptor)
    return kNotSupported;
  if (prop->requested_handle_types != 0 && control().without_fds != 0) return kNotSupported;
  return kSuccess;
}

}  // namespace

void* resolve_mapping(CUdeviceptr pointer, std::size_t nbytes, const std::string& where) {
  const std::lock_guard lock(g_mappings_mutex);
  const auto found = containing(g_mappings, pointer);
  if (found == g_mappings.end() || pointer >= found->first + found->second.nbytes) {
    const auto range = containing(g_ranges, pointer);
    const bool reserved = range != g_ranges.end() && pointer < range->first + range->second;
    violation(where + (reserved ? "at an address where nothing is mapped, or not any more"
                                : "at an address that is not allocated, or not any more"));
    return nullptr;
  }
  const auto& [base, mapping] = *found;
  if (pointer + nbytes > base + mapping.nbytes) {
    violation(where + "beyond the end of a mapping");
    return nullptr;
  }
  if (mapping.allowed.count(current_context()->physical) == 0) {
    violation(where + "of a mapping that the device has no access to");
    return nullptr;
  }
  return mapping.host + (pointer - base);
}

bool find_mapping(CUdeviceptr pointer, Mapped* mapped) {
  const std::lock_guard lock(g_mappings_mutex);
  const auto found = containing(g_mappings, pointer);
  if (found == g_mappings.end() || pointer >= found->first + found->second.nbytes) return false;
  *mapped = {found->first, found->second.nbytes, found->second.memory.physical};
  return true;
}

void note_left_mappings(CUcontext context) {
  if (!context->primary) return;
  const std::lock_guard lock(g_mappings_mutex);
  for (const auto& [base, mapping] : g_mappings)
    if (mapping.memory.physical == context->physical)
      violation("a context goes, and memory of its device is still mapped");
  if (!contexts_there().empty()) return;
  if (!g_ranges.empty()) violation("the last context goes, and a range is still reserved");
  if (!g_handles.empty()) violation("the last context goes, and a handle is not released");
}

SIMCUDA_API cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop,
                                          int option) {
  Call call("cuMemGetAllocationGranularity");
  if (const CUresult fault = call.with(option).begin(false)) return call.end(fault);
  if (const CUresult result = check(prop)) return call.end(result);
  *granularity = kBlock;
  return call.end(kSuccess);
}

SIMCUDA_API cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t nbytes,
                        const CUmemAllocationProp* prop, unsigned long long flags) {
  Call call("cuMemCreate");
  if (const CUresult fault = call.with(nbytes).with(flags).begin(false)) return call.end(fault);
  if (const CUresult result = check(prop)) return call.end(result);
  if (!is_granular(nbytes) || flags != 0) return call.end(kInvalidValue);
  spend(settings().allocate_us);
  const int physical = context_of(prop->location.id)->physical;
  if (!take_room(physical, nbytes)) return call.end(kOutOfMemory);
  const std::lock_guard lock(g_mappings_mutex);
  const std::string name = kPrefix + std::to_string(getpid()) + "-" +
                           std::to_string(++g_mapping_count) + "-" + std::to_string(physical);
  const int descriptor = make_file(name, nbytes);
  if (descriptor < 0) {
    control().used_bytes[physical] -= nbytes;
    return call.end(kOutOfMemory);
  }
  *handle = new_handle({name, descriptor, nbytes, physical});
  return call.end(kSuccess);
}

SIMCUDA_API cuMemRelease(CUmemGenericAllocationHandle handle) {
  Call call("cuMemRelease");
  if (const CUresult fault = call.begin(false)) return call.end(fault);
  const std::lock_guard lock(g_mappings_mutex);
  const auto found = g_handles.find(handle);
  if (found == g_handles.end()) {
    violation("cuMemRelease of what is no handle, or was released");
    return call.end(kInvalidValue);
  }
  let_go(found->second);
  g_handles.erase(found);
  return call.end(kSuccess);
}

SIMCUDA_API cuMemExportToShareableHandle(void* shared, CUmemGenericAllocationHandle handle,
                                         int type, unsigned long long flags) {
  Call call("cuMemExportToShareableHandle");
  if (const CUresult fault = call.with(type).with(flags).begin(false)) return call.end(fault);
  const std::lock_guard lock(g_mappings_mutex);
  const auto found = g_handles.find(handle);
  if (found == g_handles.end() || type != kPosixFileDescriptor) return call.end(kInvalidValue);
  const int descriptor = fcntl(found->second.descriptor, F_DUPFD_CLOEXEC, 0);
  if (descriptor < 0) return call.end(kOutOfMemory);
  *static_cast<int*>(shared) = descriptor;
  return call.end(kSuccess);
}

SIMCUDA_API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared,
                                           int type) {
  Call call("cuMemImportFromShareableHandle");
  if (const CUresult fault = call.with(type).begin(false)) return call.end(fault);
  if (const CUresult refused = refused_opening("descriptors")) return call.end(refused);
  const auto given = static_cast<int>(reinterpret_cast<std::intptr_t>(shared));
  const std::string link = "/proc/self/fd/" + std::to_string(given);
  char target[512] = {};
  struct stat status{};
  int owner = 0;
  int number = 0;
  int physical = 0;
  // Only what was exported is taken: a descriptor of anything else is no memory of a device.
  const std::string home = world_path(kPrefix);
  if (type != kPosixFileDescriptor || readlink(link.c_str(), target, sizeof target - 1) < 0 ||
      home.compare(0, home.size(), target, home.size()) != 0 || fstat(given, &status) != 0)
    return call.end(kInvalidValue);
  const std::string name = std::string(target).substr(world_path("").size());
  if (std::sscanf(name.c_str(), "physical-%d-%d-%d", &owner, &number, &physical) != 3)
    return call.end(kInvalidValue);
  const int descriptor = open_file(name, true);
  if (descriptor < 0) return call.end(kInvalidValue);
  const std::lock_guard lock(g_mappings_mutex);
  *handle = new_handle({name, descriptor, static_cast<std::size_t>(status.st_size), physical});
  return call.end(kSuccess);
}

SIMCUDA_API cuMemAddressReserve(CUdeviceptr* pointer, std::size_t nbytes, std::size_t alignment,
                                CUdeviceptr, unsigned long long flags) {
  Call call("cuMemAddressReserve");
  if (const CUresult fault = call.with(nbytes).with(alignment).begin(false)) return call.end(fault);
  if (!is_granular(nbytes) || alignment > kBlock || flags != 0) return call.end(kInvalidValue);
  const std::lock_guard lock(g_mappings_mutex);
  *pointer = new_address(nbytes);
  g_ranges[*pointer] = nbytes;
  return call.end(kSuccess);
}

SIMCUDA_API cuMemAddressFree(CUdeviceptr pointer, std::size_t nbytes) {
  Call call("cuMemAddressFree");
  if (const CUresult fault = call.with(nbytes).begin(false)) return call.end(fault);
  const std::lock_guard lock(g_mappings_mutex);
  const auto found = g_ranges.find(pointer);
  const auto mapping = g_mappings.lower_bound(pointer);
  if (found == g_ranges.end() || found->second != nbytes) {
    violation("cuMemAddressFree of what is not reserved so");
    return call.end(kInvalidValue);
  }
  if (mapping != g_mappings.end() && mapping->first < pointer + nbytes) {
    violation("cuMemAddressFree of a range in which memory is mapped");
    return call.end(kInvalidValue);
  }
  g_ranges.erase(found);
  return call.end(kSuccess);
}

SIMCUDA_API cuMemMap(CUdeviceptr pointer, std::size_t nbytes, std::size_t offset,
                     CUmemGenericAllocationHandle handle, unsigned long long flags) {
  Call call("cuMemMap");
  if (const CUresult fault = call.with(nbytes).with(offset).begin(false)) return call.end(fault);
  spend(settings().open_us);
  const std::lock_guard lock(g_mappings_mutex);
  const auto memory = g_handles.find(handle);
  const auto range = containing(g_ranges, pointer);
  if (flags != 0 || memory == g_handles.end() || !is_granular(nbytes) || offset % kBlock != 0 ||
      offset + nbytes > memory->second.nbytes)
    return call.end(kInvalidValue);
  if (range == g_ranges.end() || pointer + nbytes > range->first + range->second) {
    violation("cuMemMap at addresses that are not reserved");
    return call.end(kInvalidValue);
  }
  const auto other = containing(g_mappings, pointer + nbytes - 1);
  if (other != g_mappings.end() && pointer < other->first + other->second.nbytes) {
    violation("cuMemMap where memory is mapped");
    return call.end(kInvalidValue);
  }
  Physical kept = memory->second;
  kept.descriptor = open_file(kept.name, true);
  char* mapped = map_file(kept.descriptor, offset, nbytes);
  if (mapped == nullptr) {
    let_go(kept);
    return call.end(kOutOfMemory);
  }
  g_mappings[pointer] = {std::move(kept), mapped, nbytes, {}};
  return call.end(kSuccess);
}

SIMCUDA_API cuMemSetAccess(CUdeviceptr pointer, std::size_t nbytes, const CUmemAccessDesc* access,
                           std::size_t count) {
  Call call("cuMemSetAccess");
  if (const CUresult fault = call.with(nbytes).with(count).begin(false)) return call.end(fault);
  const std::lock_guard lock(g_mappings_mutex);
  const auto found = g_mappings.find(pointer);
  if (found == g_mappings.end() || found->second.nbytes != nbytes || count == 0)
    return call.end(kInvalidValue);
  Mapping& mapping = found->second;
  for (const CUmemAccessDesc* each = access; each != access + count; ++each) {
    CUcontext context = context_of(each->location.id);
    if (each->location.type != kMemoryOnDevice) return call.end(kInvalidValue);
    if (context == nullptr ||
        (context->physical != mapping.memory.physical && control().peer_access == 0))
      return call.end(kInvalidDevice);
    if (each->flags == kReadWrite)
      mapping.allowed.insert(context->physical);
    else
      mapping.allowed.erase(context->physical);
  }
  return call.end(kSuccess);
}

SIMCUDA_API cuMemUnmap(CUdeviceptr pointer, std::size_t nbytes) {
  // It does not wait for streams: what still uses the range finds nothing there.
  Call call("cuMemUnmap");
  if (const CUresult fault = call.with(nbytes).begin(false)) return call.end(fault);
  spend(settings().close_us);
  const std::lock_guard lock(g_mappings_mutex);
  const auto found = g_mappings.find(pointer);
  if (found == g_mappings.end() || found->second.nbytes != nbytes) {
    violation("cuMemUnmap of what is not mapped so");
    return call.end(kInvalidValue);
  }
  munmap(found->second.host, nbytes);
  let_go(found->second.memory);
  g_mappings.erase(found);
  return call.end(kSuccess);
}
