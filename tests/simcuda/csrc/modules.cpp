// Modules and kernels: whatever is loaded that the device could run, the library that
// SIMCUDA_KERNEL names is what runs, on a stream like other work, with the memory that its pointers
// mean.
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "capture.h"
#include "contexts.h"
#include "images.h"
#include "memory.h"
#include "streams.h"
#include "world.h"

struct Module {
  CUcontext context;
  void* library;
};

struct Function {
  CUmodule module;
};

namespace {

using Resolve = void* (*)(unsigned long long, std::size_t, const char*);
using ArgumentBytes = std::size_t (*)();
using PackArguments = void (*)(void**, void*);
using Launch = int (*)(const unsigned*, unsigned, const void*, Resolve);

std::mutex& g_modules_mutex = *new std::mutex;
auto& g_modules = *new std::map<CUmodule, std::unique_ptr<Module>>;
auto& g_functions = *new std::map<CUfunction, std::unique_ptr<Function>>;

template <typename T>
T symbol(void* library, const char* name) {
  return reinterpret_cast<T>(dlsym(library, name));
}

}  // namespace

SIMCUDA_API cuModuleLoadData(CUmodule* module, const void* image) {
  Call call("cuModuleLoadData");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const char* name = std::getenv("SIMCUDA_KERNEL");
  void* library = name == nullptr ? nullptr : dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (const CUresult refused = refused_image(image)) return call.end(refused);
  if (library == nullptr) return call.end(kInvalidImage);
  auto made = std::make_unique<Module>(Module{current_context(), library});
  *module = made.get();
  const std::lock_guard lock(g_modules_mutex);
  g_modules.emplace(made.get(), std::move(made));
  return call.end(kSuccess);
}

SIMCUDA_API cuModuleUnload(CUmodule module) {
  Call call("cuModuleUnload");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const std::lock_guard lock(g_modules_mutex);
  return call.end(g_modules.erase(module) == 1 ? kSuccess : kInvalidHandle);
}

SIMCUDA_API cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Call call("cuModuleGetFunction");
  if (const CUresult fault = call.begin()) return call.end(fault);
  const std::lock_guard lock(g_modules_mutex);
  if (g_modules.count(module) == 0) return call.end(kInvalidHandle);
  if (std::string(name) != "resize_normalize") return call.end(kNotFound);
  auto made = std::make_unique<Function>(Function{module});
  *function = made.get();
  g_functions.emplace(made.get(), std::move(made));
  return call.end(kSuccess);
}

SIMCUDA_API cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                           unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                           CUstream handle, void** parameters, void** extra) {
  Call call("cuLaunchKernel");
  call.with(grid_x).with(grid_y).with(grid_z).with(block_x);
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle, Use::kWork);
  if (stream == nullptr) return call.end(kInvalidHandle);
  if (block_y != 1 || block_z != 1 || grid_z != 1 || shared != 0 || extra != nullptr)
    return call.end(kInvalidValue);
  void* library = nullptr;
  {
    const std::lock_guard lock(g_modules_mutex);
    const auto found = g_functions.find(function);
    if (found == g_functions.end() || g_modules.count(found->second->module) == 0)
      return call.end(kInvalidHandle);
    if (found->second->module->context != current_context()) return call.end(kInvalidContext);
    library = found->second->module->library;
  }
  std::vector<char> packed(symbol<ArgumentBytes>(library, "argument_bytes")());
  symbol<PackArguments>(library, "pack_arguments")(parameters, packed.data());
  const auto launch = symbol<Launch>(library, "launch_on_host");
  const std::array<unsigned, 2> grid = {grid_x, grid_y};
  return call.end(submit(stream, [packed = std::move(packed), launch, grid, block_x]() -> CUresult {
    const int result = launch(grid.data(), block_x, packed.data(), &resolve_in_kernel);
    if (result == 2) violation("a kernel has a barrier that not all threads reach");
    return result == 0 ? kSuccess : kIllegalAddress;
  }));
}
