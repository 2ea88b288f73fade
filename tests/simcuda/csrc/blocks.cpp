#include "blocks.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>

#include "world.h"

namespace {

constexpr std::size_t kAddresses = std::size_t{1} << 40U;

bool is_memory(const std::string& name) {
  return name.rfind("memory-", 0) == 0 || name.rfind("physical-", 0) == 0;
}

// Takes back what processes had that are gone, as the real driver does when they end.
void reap_all() {
  DIR* directory = opendir(world_path("").c_str());
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) reap_file(entry->d_name);
  closedir(directory);
}

}  // namespace

// Who takes a device pointer for one of the host's dies of it. They differ from process to process.
CUdeviceptr new_address(std::size_t nbytes) {
  static std::mutex& mutex = *new std::mutex;
  static CUdeviceptr next = 0;
  const std::lock_guard lock(mutex);
  if (next == 0) {
    void* reserved =
        mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const auto at = reinterpret_cast<CUdeviceptr>(reserved) + (getpid() % 512) * kBlock;
    next = (at + kBlock) / kBlock * kBlock;
  }
  const CUdeviceptr address = next;
  next += (nbytes + 2 * kBlock - 1) / kBlock * kBlock;
  return address;
}

bool take_room(int physical, std::size_t nbytes) {
  auto& used = control().used_bytes[physical];
  for (const bool again : {true, false}) {
    if (used.fetch_add(nbytes) + nbytes <= control().memory_bytes) return true;
    used -= nbytes;
    if (again) reap_all();
  }
  return false;
}

int make_file(const std::string& name, std::size_t nbytes) {
  // Under its name it is only when it is locked: without a lock it would be free.
  const std::string path = world_path("new-" + name);
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor >= 0 && flock(descriptor, LOCK_SH) == 0 &&
      ftruncate(descriptor, static_cast<off_t>(nbytes)) == 0 &&
      rename(path.c_str(), world_path(name).c_str()) == 0)
    return descriptor;
  if (descriptor >= 0) close(descriptor);
  return -1;
}

int open_file(const std::string& name, bool kept) {
  const int descriptor = open(world_path(name).c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor >= 0 && kept) flock(descriptor, LOCK_SH);
  return descriptor;
}

char* map_file(int descriptor, std::size_t offset, std::size_t nbytes) {
  void* mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                      static_cast<off_t>(offset));
  return mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
}

void reap_file(const std::string& name) {
  if (!is_memory(name)) return;
  const int descriptor = open(world_path(name).c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return;
  struct stat status{};
  // Its name ends in the device.
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0 && fstat(descriptor, &status) == 0 &&
      unlink(world_path(name).c_str()) == 0)
    control().used_bytes[name.back() - '0'] -= static_cast<std::uint64_t>(status.st_size);
  close(descriptor);
}
