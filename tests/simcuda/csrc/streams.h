// Streams: each runs its work on a thread of its own, in order, some time after it was asked for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "driver_types.h"

using Work = std::function<CUresult()>;

struct Stream {
  Stream(CUcontext owner, unsigned stream_flags);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Returns the number of the work; `reached` it means that it is done.
  std::uint64_t add(Work work);
  void wait(std::uint64_t number);
  bool reached(std::uint64_t number);
  std::uint64_t last();

  const CUcontext context;
  const unsigned flags;

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  std::uint64_t added_ = 0;
  std::uint64_t done_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

// The stream of a handle in the current context; null for one that is none, or of another context.
Stream* find_stream(CUstream handle);
// Adds work behind what the rules of the legacy default stream put before it.
std::uint64_t enqueue(Stream* stream, Work work);
// Waits for all work of a context.
void synchronize(CUcontext context);
