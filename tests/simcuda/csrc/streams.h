// Streams: each runs its work on a thread of its own, in order, some time after it was asked for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "driver_types.h"

using Work = std::function<CUresult()>;

// Never freed: its thread, or who waits for it, may be about to look once more.
struct Stream {
  Stream(CUcontext owner, unsigned stream_flags);
  ~Stream() = delete;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Returns the number of the work; `reached` it means that it is done.
  std::uint64_t add(Work work);
  void wait(std::uint64_t number);
  bool reached(std::uint64_t number);
  std::uint64_t last();
  // Takes no more work: its thread ends when all is done.
  void close();

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
};

// What may be asked of a stream while another context is current.
enum class Use {
  // Launches and fills: no.
  kWork,
  // Copies: between primary contexts.
  kCopy,
  // Waits and questions: whatever is current.
  kAny,
};
// The stream of a handle; null, and noted, for one that is none, or must not be used so.
Stream* find_stream(CUstream handle, Use use = Use::kAny);
bool is_legacy(const Stream* stream);
// Adds work behind what the rules of the legacy default stream put before it.
std::uint64_t enqueue(Stream* stream, Work work);
// Lets the caller wait for work on a stream.
void wait_for(Stream* stream, std::uint64_t number);
// Adds work behind all that the streams of a context have to do now.
void enqueue_behind_all(CUcontext context, Work work);
// Lets the caller wait for all work of a context.
void synchronize(CUcontext context);
// The same of all contexts.
void synchronize_all();
// A context goes, and its streams with it.
void forget_streams(CUcontext context);
