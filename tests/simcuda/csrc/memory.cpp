#include "memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>

#include "contexts.h"
#include "driver_lock.h"
#include "mappings.h"
#include "settings.h"
#include "streams.h"
#include "world.h"

namespace {

constexpr std::size_t kAlignment = std::size_t{2} << 20U;
constexpr std::size_t kAddresses = std::size_t{1} << 40U;

struct Allocation {
  std::string name;
  int descriptor;
  char* host;
  std::size_t nbytes;
  int physical;
  // Of an import: who exported it, and how often it is open. 0 for one's own.
  int exporter;
  int opened;
  CUcontext context;
};

// Never destroyed: streams may still run when the process ends.
std::mutex& g_mutex = *new std::mutex;
auto& g_allocations = *new std::map<CUdeviceptr, Allocation>;
CUdeviceptr g_next = 0;
std::uint64_t g_count = 0;

std::map<CUdeviceptr, Allocation>::iterator containing(CUdeviceptr pointer) {
  auto after = g_allocations.upper_bound(pointer);
  if (after == g_allocations.begin()) return g_allocations.end();
  --after;
  return pointer < after->first + after->second.nbytes ? after : g_allocations.end();
}

char* map(int descriptor, std::size_t nbytes) {
  void* mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
}

bool is_gone(const Allocation& allocation) {
  struct stat status{};
  return fstat(allocation.descriptor, &status) != 0 || status.st_nlink == 0 ||
         (kill(allocation.exporter, 0) != 0);
}

// The names of allocations say whose they are and where: `memory-PID-NUMBER-DEVICE`.
std::string new_name(int physical) {
  return "memory-" + std::to_string(getpid()) + "-" + std::to_string(++g_count) + "-" +
         std::to_string(physical);
}

// Takes back what processes had that are gone, as the real driver does when they end.
void reap() {
  DIR* directory = opendir(world_path("").c_str());
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    int owner = 0;
    int number = 0;
    int physical = 0;
    struct stat status{};
    const std::string path = world_path(entry->d_name);
    if (reap_physical(entry->d_name)) continue;
    if (std::sscanf(entry->d_name, "memory-%d-%d-%d", &owner, &number, &physical) == 3 &&
        kill(owner, 0) != 0 && stat(path.c_str(), &status) == 0 && unlink(path.c_str()) == 0)
      control().used_bytes[physical] -= static_cast<std::uint64_t>(status.st_size);
  }
  closedir(directory);
}

void forget(std::map<CUdeviceptr, Allocation>::iterator found) {
  munmap(found->second.host, found->second.nbytes);
  close(found->second.descriptor);
  g_allocations.erase(found);
}

void free_own(std::map<CUdeviceptr, Allocation>::iterator found) {
  unlink(world_path(found->second.name).c_str());
  control().used_bytes[found->second.physical] -= found->second.nbytes;
  forget(found);
}

}  // namespace

// Addresses that nothing is mapped at: who takes a device pointer for one of the host's dies of it.
// They are never given twice, and differ from process to process.
CUdeviceptr new_address(std::size_t nbytes) {
  static std::mutex& mutex = *new std::mutex;
  const std::lock_guard lock(mutex);
  if (g_next == 0) {
    void* reserved =
        mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const auto at = reinterpret_cast<CUdeviceptr>(reserved) + (getpid() % 512) * kAlignment;
    g_next = (at + kAlignment) / kAlignment * kAlignment;
  }
  const CUdeviceptr address = g_next;
  g_next += (nbytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
  return address;
}

bool take_room(int physical, std::size_t nbytes) {
  auto& used = control().used_bytes[physical];
  for (const bool again : {true, false}) {
    if (used.fetch_add(nbytes) + nbytes <= control().memory_bytes) return true;
    used -= nbytes;
    if (again) reap();
  }
  return false;
}

void* resolve(CUdeviceptr pointer, std::size_t nbytes, const char* what) {
  const std::lock_guard lock(g_mutex);
  const auto found = containing(pointer);
  const std::string where = std::string(what) + ": " + std::to_string(nbytes) + " bytes ";
  if (found == g_allocations.end()) return resolve_mapping(pointer, nbytes, where);
  const auto& [base, allocation] = *found;
  if (pointer + nbytes > base + allocation.nbytes) {
    violation(where + "beyond the end of an allocation");
    return nullptr;
  }
  if (allocation.exporter != 0 && is_gone(allocation)) {
    violation(where + "of an import whose exporter has freed it, or is gone");
    return nullptr;
  }
  return allocation.host + (pointer - base);
}

void* resolve_in_kernel(CUdeviceptr pointer, std::size_t nbytes, const char* what) {
  {
    const std::lock_guard lock(g_mutex);
    const auto found = containing(pointer);
    if (found != g_allocations.end() && !reaches(current_context(), found->second.context)) {
      violation(std::string(what) + ": memory of another context, which this one does not reach");
      return nullptr;
    }
  }
  return resolve(pointer, nbytes, what);
}

void forget_all(CUcontext context) {
  const std::lock_guard lock(g_mutex);
  for (auto found = g_allocations.begin(); found != g_allocations.end();) {
    const auto gone = found++;
    if (gone->second.context != context) continue;
    gone->second.exporter == 0 ? free_own(gone) : forget(gone);
  }
  note_left_mappings(context);
}

CUresult describe(CUdeviceptr pointer, Exported* exported) {
  const std::lock_guard lock(g_mutex);
  const auto found = containing(pointer);
  if (found == g_allocations.end() || found->second.exporter != 0) return kInvalidValue;
  const Allocation& allocation = found->second;
  *exported = {allocation.name, allocation.physical, allocation.nbytes};
  return kSuccess;
}

CUresult open_allocation(const std::string& name, int physical, std::size_t nbytes, int exporter,
                         CUdeviceptr* pointer) {
  const std::lock_guard lock(g_mutex);
  for (auto& [base, allocation] : g_allocations) {
    if (allocation.name != name || allocation.exporter == 0) continue;
    // Only one context of a device may open the memory of another process.
    if (allocation.context != current_context()) return kInvalidContext;
    ++allocation.opened;
    *pointer = base;
    return kSuccess;
  }
  const int descriptor = open(world_path(name).c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return kInvalidValue;
  char* host = map(descriptor, nbytes);
  if (host == nullptr) {
    close(descriptor);
    return kOutOfMemory;
  }
  *pointer = new_address(nbytes);
  g_allocations[*pointer] = {name,     descriptor, host, nbytes,
                             physical, exporter,   1,    current_context()};
  return kSuccess;
}

CUresult close_allocation(CUdeviceptr pointer) {
  const std::lock_guard lock(g_mutex);
  const auto found = g_allocations.find(pointer);
  if (found == g_allocations.end() || found->second.exporter == 0) {
    violation("cuIpcCloseMemHandle of what is not open");
    return kInvalidValue;
  }
  if (--found->second.opened == 0) forget(found);
  return kSuccess;
}

// -- allocations ---------------------------------------------------------------------------------

SIMCUDA_API cuMemAlloc_v2(CUdeviceptr* pointer, std::size_t nbytes) {
  Call call("cuMemAlloc");
  if (const CUresult fault = call.with(nbytes).begin()) return call.end(fault);
  if (nbytes == 0) return call.end(kInvalidValue);
  spend(settings().allocate_us);
  const int physical = current_context()->physical;
  if (!take_room(physical, nbytes)) return call.end(kOutOfMemory);
  const std::lock_guard lock(g_mutex);
  const std::string name = new_name(physical);
  const int descriptor =
      open(world_path(name).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  char* host = nullptr;
  if (descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(nbytes)) == 0)
    host = map(descriptor, nbytes);
  if (host == nullptr) {
    control().used_bytes[physical] -= nbytes;
    return call.end(kOutOfMemory);
  }
  *pointer = new_address(nbytes);
  g_allocations[*pointer] = {name, descriptor, host, nbytes, physical, 0, 0, current_context()};
  return call.end(kSuccess);
}

SIMCUDA_API cuMemFree_v2(CUdeviceptr pointer) {
  Call call("cuMemFree");
  if (const CUresult fault = call.begin()) return call.end(fault);
  // As on a real device this waits for all that runs.
  synchronize(current_context());
  const std::lock_guard lock(g_mutex);
  const auto found = g_allocations.find(pointer);
  if (found == g_allocations.end() || found->second.exporter != 0) {
    violation("cuMemFree of what is not allocated here");
    return call.end(kInvalidValue);
  }
  free_own(found);
  return call.end(kSuccess);
}

SIMCUDA_API cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  Call call("cuMemGetInfo");
  if (const CUresult fault = call.begin()) return call.end(fault);
  *total = control().memory_bytes;
  *free = *total - control().used_bytes[current_context()->physical].load();
  return call.end(kSuccess);
}

SIMCUDA_API cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* nbytes, CUdeviceptr pointer) {
  Call call("cuMemGetAddressRange");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const std::lock_guard lock(g_mutex);
  const auto found = containing(pointer);
  Mapped place{};
  if (found != g_allocations.end())
    place = {found->first, found->second.nbytes, found->second.physical};
  else if (!find_mapping(pointer, &place))
    return call.end(kInvalidValue);
  if (base != nullptr) *base = place.base;
  if (nbytes != nullptr) *nbytes = place.nbytes;
  return call.end(kSuccess);
}

SIMCUDA_API cuPointerGetAttribute(void* data, int attribute, CUdeviceptr pointer) {
  Call call("cuPointerGetAttribute");
  if (const CUresult fault = call.with(attribute).begin(false)) return call.end(fault);
  const bool pinned = is_pinned(reinterpret_cast<void*>(pointer), 1);
  const std::lock_guard lock(g_mutex);
  const auto found = containing(pointer);
  // What is mapped has no context of its own, whatever has been made current.
  Mapped place{};
  const bool mapped = found == g_allocations.end() && find_mapping(pointer, &place);
  const bool device = found != g_allocations.end() || mapped;
  if (!device && !pinned) return call.end(kInvalidValue);
  if (device && !mapped) place = {found->first, found->second.nbytes, found->second.physical};
  CUcontext context = device ? context_of_physical(place.physical) : context_of(0);
  switch (attribute) {
    case 1:  // the context
      *static_cast<CUcontext*>(data) = mapped ? nullptr : context;
      break;
    case 2:  // the kind of memory: the host's or a device's
      *static_cast<unsigned*>(data) = device ? 2 : 1;
      break;
    case 3:  // the device's pointer
      *static_cast<CUdeviceptr*>(data) = pointer;
      break;
    case 9:  // the device's ordinal
      *static_cast<int*>(data) = context == nullptr ? -1 : context->device;
      break;
    case 11:  // where its range begins
      *static_cast<CUdeviceptr*>(data) = device ? place.base : pointer;
      break;
    case 12:  // how long that is
      *static_cast<std::size_t*>(data) = place.nbytes;
      break;
    default:
      return call.end(kInvalidValue);
  }
  return call.end(kSuccess);
}
