// The sending side of a connection: frames in order, DATA as the peer's windows allow, streams in
// turn.
//
// A response that is small and that the windows let through is framed at once, its bytes copied
// behind those of others. Other DATA waits with its stream, as the caller's own memory, and is
// framed when output may be added:
//
//   data --small, windows open, nothing queued------------> pieces --gather, sent--> socket
//     `--> the stream's queue --> round (streams with window) --'
//                  ^  WINDOW_UPDATE --'
#pragma once

#include <sys/uio.h>

#include "net/hpack.h"
#include "net/http2_state.h"
#include "std.h"

namespace gpubridge::http2 {

class Sender {
 public:
  explicit Sender(State& state) : state_(state) {}

  // Sends headers, or with `end` trailers behind all data. Throws std::logic_error for headers that
  // end nothing behind queued data, or for a stream whose end is queued.
  void headers(Stream& stream, const std::shared_ptr<const HeaderFields>& fields, bool end);
  // Sends body bytes; what the windows do not allow yet is queued, not copied. Throws
  // std::logic_error for a stream whose end is queued.
  void data(Stream& stream, std::span<const Segment> segments, bool end);

  // Closes a stream with RST_STREAM; one that is not open is told of all the same.
  void reset(std::uint32_t id, ErrorCode code);
  // Closes a stream that the peer has reset.
  void forget(std::uint32_t id) {
    state_.streams.erase(id);
    closed_one();
  }

  // Sends a frame that is no part of a response.
  void control(FrameType type, std::uint8_t flags, std::uint32_t stream, std::string_view payload);
  void window_update(std::uint32_t stream, std::int64_t credit);
  // The peer has made us send the last frame: it has to read such answers. Throws ConnectionFault.
  void check_answers() const;
  void goaway(std::uint32_t last_stream, ErrorCode code, std::string_view text);
  // Accepts no more streams, and says so; with the last open one the connection ends.
  void refuse_streams();
  // Sends our settings, and the connection's window.
  void announce_settings();

  // The peer's windows grow. These throw ConnectionFault and StreamFault where one overflows.
  void widen(std::int64_t increment);
  void widen_stream(Stream& stream, std::int64_t increment);
  void change_initial_window(std::int64_t delta);
  void limit_table(std::uint64_t smallest, std::uint64_t last) {
    encoder_.limit_table(smallest, last);
  }

  // True if there may be anything for the socket.
  [[nodiscard]] bool waits() const { return !pieces_.empty() || !round_.empty(); }
  // Frames queued DATA if nothing else waits for the socket; returns whether anything does.
  bool fill() {
    if (!shared_ && !round_.empty()) share();
    return !pieces_.empty();
  }
  // The memory that waits for the socket, in order, as much of it as fits into `pieces`.
  std::size_t gather(std::span<iovec> pieces) const;
  // The socket has taken so many bytes.
  void sent(std::size_t nbytes);
  // Everything that waits for the socket, with its owners: no longer waiting here.
  std::vector<Segment> take_all();

  // Drops all streams and what they have queued; what is framed stays.
  void close() {
    state_.streams.clear();
    round_.clear();
  }

 private:
  struct Piece {
    std::string bytes;  // of ours, or
    Segment segment;    // of the caller's
    [[nodiscard]] std::string_view view() const;
  };

  // Where bytes of ours are appended.
  std::string& tail() {
    if (pieces_.empty() || pieces_.back().segment.data != nullptr) pieces_.emplace_back();
    return pieces_.back().bytes;
  }
  void frame_headers(Stream& stream, const HeaderFields& fields, bool end);
  void queue(Stream& stream, std::span<const Segment> segments, std::uint64_t size, bool end);
  void ended(Stream& stream);
  void closed_one();
  void join_round(Stream& stream);
  void share();
  void frame_data(Stream& stream, std::size_t size);
  void frame_payload(Stream& stream, std::size_t size);
  void finish_turn(Stream& stream);

  State& state_;
  HpackEncoder encoder_;
  std::deque<Piece> pieces_;
  bool shared_ = false;   // whether there is DATA of queues among them
  std::size_t sent_ = 0;  // bytes of the first piece that have gone
  std::int64_t window_ = kDefaultWindow;
  std::deque<std::uint32_t> round_;
  std::int64_t control_frames_ = 0;  // that wait for the socket
  std::string block_;
};

}  // namespace gpubridge::http2
