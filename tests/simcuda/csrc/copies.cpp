// Copies and fills: work on streams, which reads host memory when it runs unless that is pageable.
#include <cstring>
#include <string>
#include <utility>

#include "capture.h"
#include "contexts.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"
#include "world.h"

namespace {

CUresult copy_between(CUdeviceptr target, CUdeviceptr source, std::size_t nbytes) {
  void* to = resolve(target, nbytes, "write");
  const void* from = resolve(source, nbytes, "read");
  if (to == nullptr || from == nullptr) return kIllegalAddress;
  std::memmove(to, from, nbytes);
  return kSuccess;
}

CUresult copy_in(CUdeviceptr target, const void* source, std::size_t nbytes) {
  void* to = resolve(target, nbytes, "write");
  if (to == nullptr) return kIllegalAddress;
  std::memcpy(to, source, nbytes);
  return kSuccess;
}

CUresult copy_out(void* target, CUdeviceptr source, std::size_t nbytes) {
  const void* from = resolve(source, nbytes, "read");
  if (from == nullptr) return kIllegalAddress;
  std::memcpy(target, from, nbytes);
  return kSuccess;
}

CUresult fill(CUdeviceptr target, unsigned char value, std::size_t count) {
  void* to = resolve_in_kernel(target, count, "memset");
  if (to == nullptr) return kIllegalAddress;
  std::memset(to, value, count);
  return kSuccess;
}

struct How {
  // The call returns when the work is done.
  bool waits = false;
  // The host's memory is not pinned.
  bool pageable = false;
  Use use = Use::kCopy;
};

// Runs one call that is nothing but work on a stream.
CUresult run(Call& call, CUstream handle, How how, Work work) {
  if (const CUresult fault = call.begin()) return call.end(fault);
  Stream* stream = find_stream(handle, how.use);
  if (stream == nullptr) return call.end(kInvalidHandle);
  if (how.pageable)
    if (const CUresult refused = refused_pageable(stream)) return call.end(refused);
  std::uint64_t number = 0;
  if (const CUresult refused = submit(stream, std::move(work), &number)) return call.end(refused);
  if (!how.waits) return call.end(kSuccess);
  wait_for(stream, number);
  return call.end(current_context()->sticky.load());
}

CUresult refuse(Call& call) {
  if (const CUresult fault = call.begin()) return call.end(fault);
  return call.end(kInvalidValue);
}

constexpr How kSynchronous{true, false, Use::kCopy};
constexpr How kAsynchronous{false, false, Use::kCopy};
constexpr How kFill{false, false, Use::kWork};

}  // namespace

SIMCUDA_API cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, std::size_t nbytes) {
  Call call("cuMemcpyHtoD");
  return run(call.with(nbytes), nullptr, kSynchronous,
             [=] { return copy_in(target, source, nbytes); });
}

SIMCUDA_API cuMemcpyDtoH_v2(void* target, CUdeviceptr source, std::size_t nbytes) {
  Call call("cuMemcpyDtoH");
  return run(call.with(nbytes), nullptr, kSynchronous,
             [=] { return copy_out(target, source, nbytes); });
}

SIMCUDA_API cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, std::size_t nbytes) {
  // Between two places of one device the host does not wait.
  Call call("cuMemcpyDtoD");
  return run(call.with(nbytes), nullptr, kAsynchronous,
             [=] { return copy_between(target, source, nbytes); });
}

SIMCUDA_API cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, std::size_t nbytes,
                                 CUstream stream) {
  Call call("cuMemcpyHtoDAsync");
  call.with(nbytes);
  if (is_partly_pinned(source, nbytes)) return refuse(call);
  if (is_pinned(source, nbytes))
    return run(call.with(1), stream, kAsynchronous,
               [=] { return copy_in(target, source, nbytes); });
  // Pageable memory is staged: it may be changed as soon as the call returns.
  std::string staged(static_cast<const char*>(source), nbytes);
  return run(call.with(0), stream, {settings().pageable_waits, true, Use::kCopy},
             [target, staged = std::move(staged)] {
               return copy_in(target, staged.data(), staged.size());
             });
}

SIMCUDA_API cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, std::size_t nbytes,
                                 CUstream stream) {
  Call call("cuMemcpyDtoHAsync");
  if (is_partly_pinned(target, nbytes)) return refuse(call.with(nbytes));
  const bool pinned = is_pinned(target, nbytes);
  // Into pageable memory it waits, whatever it is called.
  return run(call.with(nbytes).with(pinned ? 1 : 0), stream, {!pinned, !pinned, Use::kCopy},
             [=] { return copy_out(target, source, nbytes); });
}

SIMCUDA_API cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, std::size_t nbytes,
                                 CUstream stream) {
  Call call("cuMemcpyDtoDAsync");
  return run(call.with(nbytes), stream, kAsynchronous,
             [=] { return copy_between(target, source, nbytes); });
}

SIMCUDA_API cuMemcpyPeerAsync(CUdeviceptr target, CUcontext, CUdeviceptr source, CUcontext,
                              std::size_t nbytes, CUstream stream) {
  Call call("cuMemcpyPeerAsync");
  return run(call.with(nbytes), stream, kAsynchronous,
             [=] { return copy_between(target, source, nbytes); });
}

SIMCUDA_API cuMemsetD8_v2(CUdeviceptr target, unsigned char value, std::size_t count) {
  Call call("cuMemsetD8");
  return run(call.with(count), nullptr, kFill, [=] { return fill(target, value, count); });
}

SIMCUDA_API cuMemsetD8Async(CUdeviceptr target, unsigned char value, std::size_t count,
                            CUstream stream) {
  Call call("cuMemsetD8Async");
  return run(call.with(count), stream, kFill, [=] { return fill(target, value, count); });
}
