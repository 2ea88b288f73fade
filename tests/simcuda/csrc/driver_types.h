// The types and constants of the CUDA driver's interface that the simulation knows.
#pragma once

#include <cstddef>
#include <cstdint>

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct Context*;
using CUstream = struct StreamHandle*;
using CUevent = struct EventHandle*;
using CUmodule = struct Module*;
using CUfunction = struct Function*;
using CUhostFn = void (*)(void*);

using CUmemGenericAllocationHandle = unsigned long long;

struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int requested_handle_types;
  CUmemLocation location;
  void* win32_metadata;
  unsigned char flags[8];
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
struct CUuuid {
  char bytes[16];
};
struct CUipcMemHandle {
  char reserved[64];
};
struct CUipcEventHandle {
  char reserved[64];
};

enum : CUresult {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kMapFailed = 205,
  kAlreadyMapped = 208,
  kNoBinaryForGpu = 209,
  kInvalidPtx = 218,
  kUnsupportedPtxVersion = 222,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kPeerAccessAlreadyEnabled = 704,
  kPeerAccessNotEnabled = 705,
  kContextIsDestroyed = 709,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
  kUnknown = 999,
};

constexpr int kMemoryPinned = 1;
constexpr int kMemoryOnDevice = 1;
constexpr int kPosixFileDescriptor = 1;
constexpr int kReadWrite = 3;

// The names of streams that every context has.
inline CUstream legacy_stream() { return reinterpret_cast<CUstream>(1); }
inline CUstream per_thread_stream() { return reinterpret_cast<CUstream>(2); }

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kBlockingSync = 4;
constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kEventInterprocess = 4;

#define SIMCUDA_API extern "C" __attribute__((visibility("default"))) CUresult
