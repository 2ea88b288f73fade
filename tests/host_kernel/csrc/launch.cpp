// Runs the image kernel's own source on a processor, block after block.
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#include "cuda_on_host.h"
#include KERNEL_SOURCE

thread_local Dim threadIdx;
thread_local Dim blockIdx;

namespace {

constexpr std::size_t kStack = 64 << 10;

struct Arguments {
  const Image* images;
  const unsigned* values;
  int width, height, filter, channels_last, value_bytes;
  unsigned padding;
};

// A context is how it begins. Later changes are jumps, which call no kernel for the mask of
// signals.
struct Fiber {
  ucontext_t context;
  jmp_buf waiting;
  bool begun;
  std::unique_ptr<char[]> stack;
  bool ended;
};

struct Block {
  jmp_buf scheduler;
  std::vector<Fiber> fibers;
  Fiber* running;
  const Arguments* arguments;
};

thread_local Block* t_block = nullptr;

void run_thread() {
  const Arguments& given = *t_block->arguments;
  resize_normalize(given.images, given.values, given.width, given.height, given.filter,
                   given.channels_last, given.value_bytes, given.padding);
  t_block->running->ended = true;
  _longjmp(t_block->scheduler, 1);
}

// Returns when the fiber waits at a barrier, or has ended.
void run_fiber(Block& block, Fiber& fiber) {
  block.running = &fiber;
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.waiting, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

// Runs one block; false if some of its threads ended while others waited at a barrier. Between two
// barriers any thread may be the first: every other block runs them backwards.
bool run_block(Block& block, bool backwards) {
  t_block = &block;
  for (Fiber& fiber : block.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.begun = fiber.ended = false;
    makecontext(&fiber.context, run_thread, 0);
  }
  while (true) {
    std::size_t ended = 0;
    for (std::size_t turn = 0; turn < block.fibers.size(); ++turn) {
      const std::size_t i = backwards ? block.fibers.size() - 1 - turn : turn;
      threadIdx = {static_cast<unsigned>(i), 0, 0};
      run_fiber(block, block.fibers[i]);
      ended += block.fibers[i].ended ? 1 : 0;
    }
    if (ended == block.fibers.size()) return true;
    if (ended != 0) return false;
  }
}

}  // namespace

void __syncthreads() {
  if (_setjmp(t_block->running->waiting) == 0) _longjmp(t_block->scheduler, 1);
}

using Resolve = void* (*)(unsigned long long pointer, std::size_t nbytes, const char* what);

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The bytes of a launch's arguments, and the arguments as the driver is given them, packed there:
// they are gone when the kernel runs.
EXPORTED std::size_t argument_bytes() { return sizeof(Arguments); }

EXPORTED void pack_arguments(void** parameters, void* packed) {
  Arguments given{};
  std::memcpy(&given.images, parameters[0], sizeof given.images);
  std::memcpy(&given.values, parameters[1], sizeof given.values);
  int* const numbers[] = {&given.width, &given.height, &given.filter, &given.channels_last,
                          &given.value_bytes};
  for (int i = 0; i < 5; ++i) std::memcpy(numbers[i], parameters[2 + i], sizeof(int));
  std::memcpy(&given.padding, parameters[7], sizeof given.padding);
  std::memcpy(packed, &given, sizeof given);
}

// `resolve` finds the memory behind a device's pointers; null where they are this process's own.
// Returns 0, 1 for memory that is not there, 2 for barriers that not all threads reach.
EXPORTED int launch_on_host(const unsigned grid[2], unsigned threads, const void* packed,
                            Resolve resolve) {
  Arguments given{};
  std::memcpy(&given, packed, sizeof given);
  const auto found = [resolve](const void* pointer, std::size_t nbytes, const char* what) {
    const auto address = reinterpret_cast<Address>(pointer);
    return resolve == nullptr ? reinterpret_cast<void*>(address) : resolve(address, nbytes, what);
  };
  std::vector<Image> images(grid[1]);
  const void* table = found(given.images, images.size() * sizeof(Image), "read");
  given.values = static_cast<const unsigned*>(found(given.values, 3 * 256 * 4, "read"));
  if (table == nullptr || given.values == nullptr) return 1;
  std::memcpy(images.data(), table, images.size() * sizeof(Image));
  for (Image& image : images) {
    const auto first = reinterpret_cast<Address>(
        found(reinterpret_cast<void*>(image.first), image.end - image.first, "read"));
    const auto target = reinterpret_cast<Address>(found(
        reinterpret_cast<void*>(image.target),
        static_cast<std::size_t>(given.width) * given.height * 3 * given.value_bytes, "write"));
    if (first == 0 || target == 0) return 1;
    image.origin += first - image.first;
    image.end += first - image.first;
    image.first = first;
    image.target = target;
  }
  given.images = images.data();

  Block block{};
  block.arguments = &given;
  block.fibers.resize(threads);
  for (Fiber& fiber : block.fibers) fiber.stack.reset(new char[kStack]);
  for (unsigned y = 0; y < grid[1]; ++y)
    for (unsigned x = 0; x < grid[0]; ++x) {
      blockIdx = {x, y, 0};
      if (!run_block(block, (x + y) % 2 == 1)) return 2;
    }
  return 0;
}
