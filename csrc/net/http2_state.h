// The streams of one HTTP/2 connection, and what its peer may still waste.
//
// States of a stream (RFC 9113, section 5.1), of which a server needs three:
//
//   idle --HEADERS--> open --END_STREAM--> half closed (remote) --our END_STREAM--> closed
//                      `--------our END_STREAM (and then RST_STREAM NO_ERROR)-------'
//
// An answer that ends before its request makes the rest of the request useless: the peer is told
// so, and there is no half closed (local). A closed stream is forgotten, but for those reset by us,
// whose late frames are forgiven for a while.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "net/grpc_framing.h"
#include "net/http2_events.h"
#include "net/http2_frames.h"
#include "net/http2_limits.h"

namespace gpubridge::http2 {

// The peer breaks a rule of the connection, which ends with GOAWAY; `text` is its debug data: what
// was expected and what came.
struct ConnectionFault {
  ErrorCode code;
  std::string text;
};

// The peer breaks a rule of a stream, which is reset.
struct StreamFault {
  std::uint32_t stream;
  ErrorCode code;
};

// Memory of the caller's, kept for as long as its owner is.
struct Place {
  std::uint8_t* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> owner = nullptr;
};

struct Segment {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> owner = nullptr;
};

struct Stream {
  Stream(std::uint32_t id, std::int64_t window, std::int64_t send_window, GrpcReader reader)
      : id(id), window(window), send_window(send_window), reader(std::move(reader)) {}

  std::uint32_t id;
  std::int64_t window;       // what the peer may still send
  std::int64_t send_window;  // what we may still send
  bool ended = false;        // the peer has sent END_STREAM
  // Credit is only given back for what is consumed.
  bool holding = false;
  std::int64_t held = 0;                  // bytes that came while holding and are not consumed
  std::optional<std::uint64_t> expected;  // bytes of the content-length still to come
  std::shared_ptr<const RequestHeaders> headers;
  GrpcReader reader;
  Place target;              // where the next payload bytes go; of size 0 for nowhere special
  std::uint64_t copied = 0;  // bytes of its targets that came through memory of ours

  // Response bytes that wait for a window or their turn, from `first` on.
  std::vector<Segment> queue;
  std::size_t first = 0;
  std::uint64_t queued = 0;
  std::uint64_t unqueued = 0;  // bytes that have left the queue so far
  bool closing = false;        // the response ends behind the queue, with trailers if any
  bool in_round = false;       // it waits for its turn in the sender's round
  std::shared_ptr<const HeaderFields> trailers;
};

// An allowance that time and useful work give back.
class Budget {
 public:
  Budget(std::int64_t allowance, std::int64_t per_second, std::int64_t per_useful)
      : allowance_(allowance),
        per_second_(per_second),
        per_useful_(per_useful),
        left_(static_cast<double>(allowance)) {}

  // Spends one; returns whether there was one. `useful` counts useful work since the beginning.
  bool spend(double now, std::uint64_t useful);

 private:
  std::int64_t allowance_;
  std::int64_t per_second_;
  std::int64_t per_useful_;
  double left_;
  std::optional<double> since_;
  std::uint64_t useful_ = 0;
};

// The streams that we have reset lately: the peer may not know it yet.
class ResetMemory {
 public:
  ResetMemory(std::size_t size, double grace) : size_(size), grace_(grace) {}

  void add(std::uint32_t stream, double now);
  // Whether frames of this stream are still forgiven.
  [[nodiscard]] bool holds(std::uint32_t stream, double now) const;

 private:
  std::size_t size_;
  double grace_;
  std::unordered_map<std::uint32_t, double> until_;
  std::deque<std::uint32_t> order_;
};

// What the parts of one connection share.
class State {
 public:
  State(const Limits& limits, std::shared_ptr<const GrpcMethods> methods);

  [[nodiscard]] const Limits& limits() const { return limits_; }
  [[nodiscard]] const GrpcMethods& methods() const { return *methods_; }
  Stream* find(std::uint32_t id);

  // Counts a stream that the peer has reset or made us reset. Throws ConnectionFault.
  void spend_reset();
  // Counts a frame that brings nothing forward. Throws ConnectionFault.
  void spend_idle_frame();

  // Seconds that only grow; told by the driver.
  double now = 0;
  std::unordered_map<std::uint32_t, Stream> streams;
  ResetMemory forgiven;
  Events events;
  // Streams with a request that is not told of yet.
  std::vector<std::uint32_t> untold;
  std::uint32_t highest_id = 0;      // that the peer has used
  std::uint32_t last_stream_id = 0;  // that was accepted
  bool refusing = false;             // no more streams are accepted
  bool closed = false;
  std::uint64_t completed = 0;  // streams whose response has ended
  std::uint64_t data_frames = 0;
  // What the peer has told of itself.
  std::int64_t peer_window = kDefaultWindow;
  std::size_t peer_frame_size = kDefaultFrameSize;

 private:
  Limits limits_;
  std::shared_ptr<const GrpcMethods> methods_;
  Budget resets_;
  Budget idle_;
};

}  // namespace gpubridge::http2
