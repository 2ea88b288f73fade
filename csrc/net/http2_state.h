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

#include "net/grpc_framing.h"
#include "net/http2_frames.h"
#include "std.h"
#include "text.h"

namespace gpubridge::http2 {

// Limits on what one connection may ask of the server. The first five are told to the peer.
struct Limits {
  // Streams open at once; further ones get REFUSED_STREAM. As many as there can be: a client's
  // library holds further calls back, and one of them may be what the open ones wait for. What they
  // keep is charged instead.
  std::int64_t max_concurrent_streams = kMaxStreamId;
  // The largest payload of a frame. Large, so that a large message needs few frames and can be
  // received straight into its place.
  std::int64_t max_frame_size = 1 << 22;
  // Bytes of DATA that a peer may send ahead: on a throttled stream, on all streams.
  std::int64_t stream_window = 1 << 20;
  std::int64_t connection_window = 1 << 26;
  // Size of a decoded header list. A larger one costs the stream, one of four times the size the
  // connection.
  std::int64_t header_list_bytes = 1 << 14;
  // Bytes of a compressed header block with all its CONTINUATION frames, and how many those are.
  std::int64_t header_block_bytes = 1 << 14;
  std::int64_t continuation_frames = 16;
  // Size of the buffer that everything but the payload of `receive_into` is received in.
  std::int64_t receive_bytes = 3 << 13;
  // About how many bytes of queued DATA are framed at a time.
  std::int64_t output_bytes = 1 << 20;
  // The most DATA that a stream gets in its turn while others wait.
  std::int64_t quantum_bytes = 1 << 17;
  // Answers (acknowledgements, resets) that may wait for a peer who does not read.
  std::int64_t unsent_control_frames = 4000;
  // Streams that the peer may cancel or make us reset: at once, and regained per second. Each
  // completed stream allows one more. As many as were ever open together may also be cancelled
  // together.
  std::int64_t resets = 500;
  std::int64_t resets_per_second = 100;
  // Frames that bring nothing forward (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA, unknown
  // types): at once, and regained per second. Each stream completed and each DATA frame sent allows
  // four more; so many for each of the streams that were ever open together come at once.
  std::int64_t idle_frames = 20'000;
  std::int64_t idle_frames_per_second = 2'000;
  // Streams reset by us whose late frames are still forgiven, as many as were open together at
  // least, and for how long they are.
  std::int64_t reset_memory = 1000;
  std::int64_t reset_grace_seconds = 30;
};

// The peer breaks a rule of the connection, which ends with GOAWAY; `text` is its debug data: what
// was expected and what came.
struct ConnectionFault {
  template <typename... Parts>
  explicit ConnectionFault(ErrorCode code, const Parts&... parts)
      : code(code), text(joined(parts...)) {}

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
  Stream(std::uint32_t id, std::int64_t window, std::int64_t send_window, GrpcReader reader,
         std::uint64_t& queued)
      : id(id),
        window(window),
        send_window(send_window),
        reader(std::move(reader)),
        queued(queued) {}

  std::uint32_t id;
  std::int64_t window;       // what the peer may still send
  std::int64_t send_window;  // what we may still send
  bool ended = false;        // the peer has sent END_STREAM
  // Credit is only given back for what is consumed.
  bool throttled = false;
  std::int64_t unconsumed = 0;            // bytes that came while throttled
  std::optional<std::uint64_t> expected;  // bytes of the content-length still to come
  GrpcReader reader;
  Place target;              // where the next payload bytes go; of size 0 for nowhere special
  std::uint64_t copied = 0;  // bytes of its targets that came through memory of ours

  // Response bytes that wait for a window or their turn, from `first` on.
  std::vector<Segment> queue;
  std::size_t first = 0;
  KeptBytes queued;
  std::uint64_t unqueued = 0;  // bytes that have left the queue so far
  bool closing = false;        // the response ends behind the queue, with trailers if any
  bool in_round = false;       // it waits for its turn in the sender's round
  std::shared_ptr<const HeaderFields> trailers;
  bool counted = false;                  // its status is known and counted
  std::unique_ptr<AccessRecord> access;  // for the access log
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
  [[nodiscard]] bool spend(double now, std::uint64_t useful) {
    if (!since_) since_ = now;
    if (left_ < 1) {
      const double regained =
          (now - *since_) * static_cast<double>(per_second_) +
          static_cast<double>((useful - useful_)) * static_cast<double>(per_useful_);
      left_ = std::min(static_cast<double>(allowance_), left_ + regained);
      since_ = now;
      useful_ = useful;
      if (left_ < 1) return false;
    }
    left_ -= 1;
    return true;
  }

  // Allows so many at once from now on, if that is more than before.
  void widen(std::int64_t allowance) {
    if (allowance <= allowance_) return;
    left_ += static_cast<double>(allowance - allowance_);
    allowance_ = allowance;
  }

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

  void add(std::uint32_t stream, double now) {
    if (until_.insert_or_assign(stream, now + grace_).second) order_.push_back(stream);
    if (order_.size() > size_) {
      until_.erase(order_.front());
      order_.pop_front();
    }
  }

  // True if frames of this stream are still forgiven.
  [[nodiscard]] bool holds(std::uint32_t stream, double now) const {
    const auto found = until_.find(stream);
    return found != until_.end() && now < found->second;
  }

  // Remembers so many from now on, if that is more than before.
  void widen(std::size_t size) { size_ = std::max(size_, size); }

 private:
  std::size_t size_;
  double grace_;
  std::unordered_map<std::uint32_t, double> until_;
  std::deque<std::uint32_t> order_;
};

// State that the parts of one connection share.
class State {
 public:
  State(const Limits& limits, std::shared_ptr<const GrpcMethods> methods)
      : forgiven(static_cast<std::size_t>(limits.reset_memory),
                 static_cast<double>(limits.reset_grace_seconds)),
        limits_(limits),
        methods_(std::move(methods)),
        resets_(limits.resets, limits.resets_per_second, kUsefulPerReset),
        idle_(limits.idle_frames, limits.idle_frames_per_second, kUsefulPerIdleFrame) {}

  [[nodiscard]] const Limits& limits() const { return limits_; }
  [[nodiscard]] const GrpcMethods& methods() const { return *methods_; }
  Stream* find(std::uint32_t id) {
    const auto found = streams.find(id);
    return found == streams.end() ? nullptr : &found->second;
  }

  // Notes that a stream has been added.
  void opened() {
    if (streams.size() <= most_open_) return;
    most_open_ = streams.size();
    resets_.widen(static_cast<std::int64_t>(most_open_));
    // Clients tell of a window for each.
    idle_.widen(static_cast<std::int64_t>(most_open_) * kUsefulPerIdleFrame);
    forgiven.widen(most_open_);
  }

  // Counts a stream that the peer has reset or made us reset. Throws ConnectionFault.
  void spend_reset() {
    if (resets_.spend(now, completed)) return;
    throw ConnectionFault(ErrorCode::kEnhanceYourCalm, "expected at most ", limits_.resets,
                          " reset streams at once and ", limits_.resets_per_second,
                          " per second beyond those completed, got more");
  }

  // Counts a frame that brings nothing forward. Throws ConnectionFault.
  void spend_idle_frame() {
    if (idle_.spend(now, completed + data_frames)) return;
    throw ConnectionFault(ErrorCode::kEnhanceYourCalm, "expected at most ", limits_.idle_frames,
                          " frames without use at once and ", limits_.idle_frames_per_second,
                          " per second, got more");
  }

  // Seconds that only grow; told by the driver.
  double now = 0;
  // Address and port of the peer; only for the access log.
  std::shared_ptr<const std::string> client;
  // Bytes of header blocks, header lists and unfinished messages, and those of control calls; these
  // totals outlive those who count in them.
  std::uint64_t kept = 0;
  std::uint64_t kept_by_control = 0;
  std::uint64_t queued = 0;  // bytes of responses that wait for a window or their turn
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
  // The peer's settings.
  std::int64_t peer_window = kDefaultWindow;
  std::size_t peer_frame_size = kDefaultFrameSize;

 private:
  static constexpr std::int64_t kUsefulPerReset = 1;
  static constexpr std::int64_t kUsefulPerIdleFrame = 4;

  Limits limits_;
  std::shared_ptr<const GrpcMethods> methods_;
  Budget resets_;
  Budget idle_;
  std::size_t most_open_ = 0;  // streams that were ever open together
};

}  // namespace gpubridge::http2
