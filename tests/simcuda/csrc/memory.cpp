#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "blocks.h"
#include "contexts.h"
#include "driver_lock.h"
#include "mappings.h"
#include "settings.h"
#include "streams.h"
#include "world.h"

namespace {

// Allocations up to this size share blocks.
constexpr std::size_t kLargestShared = std::size_t{1} << 20U;
constexpr std::size_t kAlignment = 512;

struct Block {
  // Who made it: this process, or who has exported it.
  int owner;
  std::uint64_t number;
  int physical;
  std::size_t nbytes;
  CUcontext context;
  int descriptor;
  char* host;
  CUdeviceptr base;
  // Of one's own: up to where it is given away. Nothing of it is given twice.
  std::size_t given = 0;
  int allocations = 0;

  std::string name() const {
    return "memory-" + std::to_string(owner) + "-" + std::to_string(number) + "-" +
           std::to_string(physical);
  }
  bool is_own() const { return owner == getpid(); }
};

struct Allocation {
  std::shared_ptr<Block> block;
  std::size_t nbytes;
  // Of an import: how often it is open, and a file that is there until its exporter frees it.
  int opened = 0;
  int mark = -1;
};

using Found = std::map<CUdeviceptr, Allocation>::iterator;

// Never destroyed: streams may still run when the process ends.
std::mutex& g_memory_mutex = *new std::mutex;
auto& g_allocations = *new std::map<CUdeviceptr, Allocation>;
// Of each context, the block that small allocations are cut from.
auto& g_shared_blocks = *new std::map<CUcontext, std::shared_ptr<Block>>;
std::uint64_t g_block_count = 0;

Found containing(CUdeviceptr pointer) {
  auto after = g_allocations.upper_bound(pointer);
  if (after == g_allocations.begin()) return g_allocations.end();
  --after;
  return pointer < after->first + after->second.nbytes ? after : g_allocations.end();
}

std::string mark_path(const Block& block, std::uint64_t offset) {
  return world_path("export-" + std::to_string(block.owner) + "-" + std::to_string(block.number) +
                    "-" + std::to_string(offset));
}

// Whether what an import means is there no more.
bool is_gone(const Allocation& allocation) {
  struct stat status{};
  if (fstat(allocation.mark, &status) != 0 || status.st_nlink == 0) return true;
  return settings().dead_exporter == DeadExporter::kFault && kill(allocation.block->owner, 0) != 0;
}

std::shared_ptr<Block> make_block(std::size_t nbytes, CUcontext context) {
  const std::size_t size = (nbytes + kBlock - 1) / kBlock * kBlock;
  if (!take_room(context->physical, size)) return nullptr;
  auto made = std::make_shared<Block>(
      Block{getpid(), ++g_block_count, context->physical, size, context, -1, nullptr, 0});
  made->descriptor = make_file(made->name(), size);
  if (made->descriptor >= 0) made->host = map_file(made->descriptor, 0, size);
  if (made->host == nullptr) {
    control().used_bytes[context->physical] -= size;
    return nullptr;
  }
  made->base = new_address(size);
  return made;
}

void unmap(const Block& block) {
  munmap(block.host, block.nbytes);
  close(block.descriptor);
}

// An allocation goes; with the last one of a block, that.
void forget(Found found) {
  const std::shared_ptr<Block> block = found->second.block;
  if (found->second.mark >= 0) close(found->second.mark);
  if (block->is_own()) unlink(mark_path(*block, found->first - block->base).c_str());
  g_allocations.erase(found);
  if (--block->allocations != 0) return;
  if (g_shared_blocks[block->context] == block) g_shared_blocks.erase(block->context);
  unmap(*block);
  reap_file(block->name());
}

// The block that another process has exported, if it is open here.
std::shared_ptr<Block> find_import(const Exported& exported) {
  for (const auto& [pointer, allocation] : g_allocations)
    if (allocation.block->owner == exported.exporter && allocation.block->number == exported.block)
      return allocation.block;
  return nullptr;
}

std::shared_ptr<Block> open_block(const Exported& exported) {
  auto opened =
      std::make_shared<Block>(Block{exported.exporter, exported.block, exported.physical,
                                    exported.block_bytes, current_context(), -1, nullptr, 0});
  opened->descriptor = open_file(opened->name(), settings().dead_exporter == DeadExporter::kHeld);
  if (opened->descriptor < 0) return nullptr;
  opened->host = map_file(opened->descriptor, 0, opened->nbytes);
  opened->base = new_address(opened->nbytes);
  return opened;
}

}  // namespace

void* resolve(CUdeviceptr pointer, std::size_t nbytes, const char* what) {
  const std::lock_guard lock(g_memory_mutex);
  const auto found = containing(pointer);
  const std::string where = std::string(what) + ": " + std::to_string(nbytes) + " bytes ";
  if (found == g_allocations.end()) return resolve_mapping(pointer, nbytes, where);
  const auto& [start, allocation] = *found;
  if (pointer + nbytes > start + allocation.nbytes) {
    violation(where + "beyond the end of an allocation");
    return nullptr;
  }
  if (!allocation.block->is_own() && is_gone(allocation)) {
    violation(where + "of an import whose exporter has freed it, or is gone");
    return nullptr;
  }
  return allocation.block->host + (pointer - allocation.block->base);
}

void* resolve_in_kernel(CUdeviceptr pointer, std::size_t nbytes, const char* what) {
  {
    const std::lock_guard lock(g_memory_mutex);
    const auto found = containing(pointer);
    if (found != g_allocations.end() && !reaches(current_context(), found->second.block->context)) {
      violation(std::string(what) + ": memory of another context, which this one does not reach");
      return nullptr;
    }
  }
  return resolve(pointer, nbytes, what);
}

void forget_all(CUcontext context) {
  {
    const std::lock_guard lock(g_memory_mutex);
    for (auto next = g_allocations.begin(); next != g_allocations.end();) {
      const auto found = next++;
      if (found->second.block->context != context) continue;
      // Of a context that is lost nothing could be closed.
      if (!found->second.block->is_own() && context->sticky.load() == kSuccess)
        violation("a context goes, and memory of another process is still open in it");
      forget(found);
    }
  }
  note_left_mappings(context);
}

// -- between processes
// -----------------------------------------------------------------------------

CUresult export_allocation(CUdeviceptr pointer, Exported* exported) {
  const std::lock_guard lock(g_memory_mutex);
  const auto found = containing(pointer);
  if (found == g_allocations.end() || !found->second.block->is_own()) return kInvalidValue;
  const auto& [start, allocation] = *found;
  const Block& block = *allocation.block;
  *exported = {block.owner,  block.physical,     block.number,
               block.nbytes, start - block.base, allocation.nbytes};
  close(open(mark_path(block, exported->offset).c_str(), O_CREAT | O_CLOEXEC, 0600));
  return kSuccess;
}

CUresult open_allocation(const Exported& exported, CUdeviceptr* pointer) {
  const std::lock_guard lock(g_memory_mutex);
  std::shared_ptr<Block> block = find_import(exported);
  if (block != nullptr) {
    // Only one context of a device may open the memory of another process.
    if (block->context != current_context()) return kInvalidContext;
    if (settings().same_block == SameBlock::kRefused) return kAlreadyMapped;
    *pointer = block->base + exported.offset;
    const auto found = g_allocations.find(*pointer);
    if (found != g_allocations.end()) {
      ++found->second.opened;
      return kSuccess;
    }
  } else {
    block = open_block(exported);
    if (block == nullptr) return kInvalidValue;
  }
  Allocation made{block, exported.nbytes, 1};
  made.mark = open(mark_path(*block, exported.offset).c_str(), O_RDONLY | O_CLOEXEC);
  if (made.mark < 0 || block->host == nullptr) {
    if (block->allocations == 0) unmap(*block);
    return kInvalidValue;
  }
  *pointer = block->base + exported.offset;
  ++block->allocations;
  g_allocations[*pointer] = std::move(made);
  return kSuccess;
}

CUresult close_allocation(CUdeviceptr pointer) {
  const std::lock_guard lock(g_memory_mutex);
  const auto found = g_allocations.find(pointer);
  if (found == g_allocations.end() || found->second.block->is_own()) {
    violation("cuIpcCloseMemHandle of what is not open");
    return kInvalidValue;
  }
  if (settings().same_block == SameBlock::kClosedOnce) {
    const std::shared_ptr<Block> block = found->second.block;
    for (auto next = g_allocations.begin(); next != g_allocations.end();) {
      const auto each = next++;
      if (each->second.block == block) forget(each);
    }
  } else if (--found->second.opened == 0) {
    forget(found);
  }
  return kSuccess;
}

// -- allocations ---------------------------------------------------------------------------------

SIMCUDA_API cuMemAlloc_v2(CUdeviceptr* pointer, std::size_t nbytes) {
  Call call("cuMemAlloc");
  if (const CUresult fault = call.with(nbytes).begin()) return call.end(fault);
  if (nbytes == 0) return call.end(kInvalidValue);
  spend(settings().allocate_us);
  CUcontext context = current_context();
  const std::lock_guard lock(g_memory_mutex);
  const bool shared = nbytes <= kLargestShared;
  std::shared_ptr<Block> block = shared ? g_shared_blocks[context] : nullptr;
  if (block == nullptr || block->given + nbytes > block->nbytes)
    block = make_block(nbytes, context);
  if (block == nullptr) return call.end(kOutOfMemory);
  if (shared) g_shared_blocks[context] = block;
  *pointer = block->base + block->given;
  block->given += (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  ++block->allocations;
  g_allocations[*pointer] = {block, nbytes};
  return call.end(kSuccess);
}

SIMCUDA_API cuMemFree_v2(CUdeviceptr pointer) {
  Call call("cuMemFree");
  if (const CUresult fault = call.begin()) return call.end(fault);
  // As on a real device this waits for all that runs.
  synchronize(current_context());
  const std::lock_guard lock(g_memory_mutex);
  const auto found = g_allocations.find(pointer);
  if (found == g_allocations.end() || !found->second.block->is_own()) {
    violation("cuMemFree of what is not allocated here");
    return call.end(kInvalidValue);
  }
  forget(found);
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
  const std::lock_guard lock(g_memory_mutex);
  const auto found = containing(pointer);
  Mapped place{};
  if (found != g_allocations.end())
    place = {found->first, found->second.nbytes, found->second.block->physical};
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
  const std::lock_guard lock(g_memory_mutex);
  const auto found = containing(pointer);
  // What is mapped has no context of its own, whatever has been made current.
  Mapped place{};
  const bool mapped = found == g_allocations.end() && find_mapping(pointer, &place);
  const bool device = found != g_allocations.end() || mapped;
  if (!device && !pinned) return call.end(kInvalidValue);
  if (device && !mapped)
    place = {found->first, found->second.nbytes, found->second.block->physical};
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
