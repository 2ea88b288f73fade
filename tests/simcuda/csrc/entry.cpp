// How the driver's functions are found, and what its error codes are called.
#include <dlfcn.h>

#include <map>
#include <string>

#include "world.h"

namespace {

const std::map<CUresult, const char*>& names() {
  static const std::map<CUresult, const char*> all = {
      {kSuccess, "CUDA_SUCCESS"},
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {100, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kMapFailed, "CUDA_ERROR_MAP_FAILED"},
      {kAlreadyMapped, "CUDA_ERROR_ALREADY_MAPPED"},
      {kNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
      {kInvalidPtx, "CUDA_ERROR_INVALID_PTX"},
      {kUnsupportedPtxVersion, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kNotReady, "CUDA_ERROR_NOT_READY"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kPeerAccessAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"},
      {kPeerAccessNotEnabled, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"},
      {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
      {kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
      {kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE"},
      {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
      {kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
      {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
      {kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
      {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT"},
      {kCaptureWrongThread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
      {304, "CUDA_ERROR_OPERATING_SYSTEM"},
      {kUnknown, "CUDA_ERROR_UNKNOWN"},
  };
  return all;
}

}  // namespace

SIMCUDA_API cuGetErrorName(CUresult error, const char** text) {
  const auto found = names().find(error);
  *text = found == names().end() ? nullptr : found->second;
  return found == names().end() ? kInvalidValue : kSuccess;
}

SIMCUDA_API cuGetErrorString(CUresult error, const char** text) {
  if (const CUresult result = cuGetErrorName(error, text)) return result;
  *text = "simulated";
  return kSuccess;
}

SIMCUDA_API cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t,
                                int* status) {
  Dl_info self{};
  dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &self);
  static void* library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  // The newest form of a function has the highest suffix; of one, forms differ by release.
  std::string newest = std::string(symbol) + "_v2";
  if (std::string(symbol) == "cuCtxCreate" && version >= 11040)
    newest = version >= 12050 ? "cuCtxCreate_v4" : "cuCtxCreate_v3";
  *function = dlsym(library, newest.c_str());
  if (*function == nullptr) *function = dlsym(library, symbol);
  if (status != nullptr) *status = *function == nullptr ? 1 : 0;
  return *function == nullptr ? kNotFound : kSuccess;
}

SIMCUDA_API cuGetProcAddress(const char* symbol, void** function, int version,
                             std::uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}
