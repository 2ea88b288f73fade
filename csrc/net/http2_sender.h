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
  void headers(Stream& stream, const std::shared_ptr<const HeaderFields>& fields, bool end) {
    if (end) count(stream, fields->grpc_status().value_or(kCancelled));
    if (stream.queued.nbytes() == 0) {
      frame_headers(stream, *fields, end);
      if (end) ended(stream);
      return;
    }
    if (stream.closing || !end) {
      throw std::logic_error("stream " + std::to_string(stream.id) +
                             ": expected trailers that end it behind its data, got headers");
    }
    stream.trailers = fields;
    stream.closing = true;
  }

  // Sends body bytes; what the windows do not allow yet is queued, not copied. Throws
  // std::logic_error for a stream whose end is queued.
  void data(Stream& stream, std::span<const Segment> segments, bool end) {
    std::uint64_t size = 0;
    for (const Segment& segment : segments) size += segment.size;
    if (stream.access != nullptr) stream.access->sent += size;
    if (stream.closing) {
      throw std::logic_error("stream " + std::to_string(stream.id) +
                             ": expected no data after its end");
    }
    const auto allowed = static_cast<std::uint64_t>(
        std::max<std::int64_t>(0, std::min(window_, stream.send_window)));
    if (size == 0 || size > kSmall || size > allowed || !round_.empty() ||
        stream.queued.nbytes() != 0) {
      queue(stream, segments, size, end);
      return;
    }
    window_ -= static_cast<std::int64_t>(size);
    stream.send_window -= static_cast<std::int64_t>(size);
    ++state_.data_frames;
    std::string& out = tail();
    append_header(
        {static_cast<std::size_t>(size), kData, end ? kEndStream : std::uint8_t{0}, stream.id},
        out);
    for (const Segment& segment : segments) append_bytes(segment, out);
    if (end) ended(stream);
  }

  // Closes a stream with RST_STREAM; one that is not open is told of all the same.
  void reset(std::uint32_t id, ErrorCode code) {
    std::string payload;
    append_u32(static_cast<std::uint32_t>(code), payload);
    control(kRstStream, 0, id, payload);
    state_.forgiven.add(id, state_.now);
    erase(id);
    closed_one();
  }

  // Closes a stream that the peer has reset.
  void forget(std::uint32_t id) {
    erase(id);
    closed_one();
  }

  // Counts all open streams as cancelled: the peer is gone.
  void count_open() {
    for (auto& [id, stream] : state_.streams) count(stream, kCancelled);
  }

  // Sends a frame that is no part of a response.
  void control(FrameType type, std::uint8_t flags, std::uint32_t stream, std::string_view payload) {
    std::string& out = tail();
    append_header({payload.size(), type, flags, stream}, out);
    out.append(payload);
    ++control_frames_;
  }

  void window_update(std::uint32_t stream, std::int64_t credit) {
    std::string payload;
    append_u32(static_cast<std::uint32_t>(credit), payload);
    control(kWindowUpdate, 0, stream, payload);
  }

  // The peer has made us send the last frame: it has to read such answers. Throws ConnectionFault.
  void check_answers() const {
    const std::int64_t limit = state_.limits().unsent_control_frames;
    if (control_frames_ <= limit) return;
    throw ConnectionFault(ErrorCode::kEnhanceYourCalm,
                          "expected the peer to read its answers, got ", limit, " unread");
  }

  void goaway(std::uint32_t last_stream, ErrorCode code, std::string_view text) {
    std::string payload;
    append_u32(last_stream, payload);
    append_u32(static_cast<std::uint32_t>(code), payload);
    payload.append(text.substr(0, kDebugBytes));
    control(kGoaway, 0, 0, payload);
  }

  // Accepts no more streams, and says so; with the last open one the connection ends.
  void refuse_streams() {
    if (state_.refusing || state_.closed) return;
    state_.refusing = true;
    goaway(state_.last_stream_id, ErrorCode::kNoError, "");
    closed_one();
  }

  // Sends our settings, and the connection's window.
  void announce_settings() {
    const Limits& limits = state_.limits();
    const std::array<std::pair<Setting, std::int64_t>, 4> settings = {{
        {kMaxConcurrentStreams, limits.max_concurrent_streams},
        {kInitialWindowSize, limits.stream_window},
        {kMaxFrameSize, limits.max_frame_size},
        {kMaxHeaderListSize, limits.header_list_bytes},
    }};
    std::string payload;
    for (const auto& [setting, value] : settings) {
      payload.push_back(0);
      payload.push_back(static_cast<char>(setting));
      append_u32(static_cast<std::uint32_t>(value), payload);
    }
    control(kSettings, 0, 0, payload);
    if (limits.connection_window > kDefaultWindow) {
      // Only WINDOW_UPDATE changes the connection's window, never a setting.
      window_update(0, limits.connection_window - kDefaultWindow);
    }
  }

  // The peer's windows grow. These throw ConnectionFault and StreamFault where one overflows.
  void widen(std::int64_t increment) {
    window_ += increment;
    if (window_ <= kMaxWindow) return;
    throw ConnectionFault(ErrorCode::kFlowControlError,
                          "WINDOW_UPDATE: expected a window of at most 2^31-1, got ", window_);
  }

  void widen_stream(Stream& stream, std::int64_t increment) {
    stream.send_window += increment;
    if (stream.send_window > kMaxWindow) {
      throw StreamFault{stream.id, ErrorCode::kFlowControlError};
    }
    join_round(stream);
  }

  void change_initial_window(std::int64_t delta) {
    for (auto& [id, stream] : state_.streams) {
      stream.send_window += delta;
      if (stream.send_window > kMaxWindow) {
        throw ConnectionFault(ErrorCode::kFlowControlError,
                              "SETTINGS: INITIAL_WINDOW_SIZE: expected stream ", id,
                              " to have a window of at most 2^31-1, got ", stream.send_window);
      }
      join_round(stream);
    }
  }

  void limit_table(std::uint64_t smallest, std::uint64_t last) {
    encoder_.limit_table(smallest, last);
  }

  // True if there may be anything for the socket.
  [[nodiscard]] bool waits() const { return !pieces_.empty() || !round_.empty(); }
  // Frames queued DATA if nothing else waits for the socket; returns whether anything does.
  [[nodiscard]] bool fill() {
    if (!shared_ && !round_.empty()) share();
    return !pieces_.empty();
  }
  // The memory that waits for the socket, in order, as much of it as fits into `pieces`.
  std::size_t gather(std::span<iovec> pieces) const {
    std::size_t count = 0;
    std::size_t skipped = sent_;
    for (const Piece& piece : pieces_) {
      if (count == pieces.size()) break;
      const std::string_view view = piece.view().substr(skipped);
      skipped = 0;
      if (view.empty()) continue;
      pieces[count++] = {const_cast<char*>(view.data()), view.size()};
    }
    return count;
  }

  // The socket has taken so many bytes.
  void sent(std::size_t nbytes) {
    while (!pieces_.empty()) {
      const std::size_t left = pieces_.front().view().size() - sent_;
      if (nbytes < left) {
        sent_ += nbytes;
        return;
      }
      nbytes -= left;
      sent_ = 0;
      pieces_.pop_front();
    }
    shared_ = false;
    control_frames_ = 0;
  }

  // Everything that waits for the socket, with its owners: no longer waiting here.
  std::vector<Segment> take_all() {
    std::vector<Segment> taken;
    std::size_t skipped = std::exchange(sent_, 0);
    for (Piece& piece : pieces_) {
      Segment segment = std::move(piece.segment);
      if (segment.data == nullptr) {
        const auto owned = std::make_shared<const std::string>(std::move(piece.bytes));
        segment = {reinterpret_cast<const std::uint8_t*>(owned->data()), owned->size(), owned};
      }
      segment.data += skipped;
      segment.size -= skipped;
      skipped = 0;
      if (segment.size != 0) taken.push_back(std::move(segment));
    }
    pieces_.clear();
    shared_ = false;
    control_frames_ = 0;
    return taken;
  }

  // Drops all streams and what they have queued; what is framed stays.
  void close() {
    state_.streams.clear();
    round_.clear();
  }

 private:
  // Every peer takes frames of this size; copying as much costs less than memory of its own.
  static constexpr std::size_t kSmall = kDefaultFrameSize;
  // Of what is queued, smaller pieces are copied.
  static constexpr std::size_t kJoined = std::size_t{1} << 12U;
  static constexpr std::size_t kDebugBytes = 1024;

  static void append_bytes(const Segment& segment, std::string& out) {
    out.append(reinterpret_cast<const char*>(segment.data), segment.size);
  }

  struct Piece {
    std::string bytes;  // of ours, or
    Segment segment;    // of the caller's
    [[nodiscard]] std::string_view view() const {
      if (segment.data == nullptr) return bytes;
      return {reinterpret_cast<const char*>(segment.data), segment.size};
    }
  };

  // The status of calls that end without one.
  static constexpr int kCancelled = 1;

  // Counts a call and logs it, once.
  void count(Stream& stream, int status) {
    if (std::exchange(stream.counted, true)) return;
    RequestCounts& counts = *state_.methods().counts();
    const auto number = static_cast<std::size_t>(stream.reader.headers()->method() + 1);
    counts.count(number, status);
    if (stream.access == nullptr) return;
    stream.access->endpoint = number;
    stream.access->status = status;
    counts.log(std::move(stream.access));
  }

  void erase(std::uint32_t id) {
    if (Stream* stream = state_.find(id)) count(*stream, kCancelled);
    state_.streams.erase(id);
  }

  // Where bytes of ours are appended.
  std::string& tail() {
    if (pieces_.empty() || pieces_.back().segment.data != nullptr) pieces_.emplace_back();
    return pieces_.back().bytes;
  }
  void frame_headers(Stream& stream, const HeaderFields& fields, bool end) {
    block_.clear();
    encoder_.encode(fields, block_);
    const std::string_view block = block_;
    std::string& out = tail();
    FrameType type = kHeaders;
    std::uint8_t flags = end ? kEndStream : 0;
    std::size_t at = 0;
    do {
      const std::string_view part = block.substr(at, kSmall);
      at += part.size();
      if (at == block.size()) flags |= kEndHeaders;
      append_header({part.size(), type, flags, stream.id}, out);
      out.append(part);
      type = kContinuation;
      flags = 0;
    } while (at < block.size());
  }

  // Keeps memory until the windows and the other streams let it through.
  void queue(Stream& stream, std::span<const Segment> segments, std::uint64_t size, bool end) {
    if (stream.queued.nbytes() == 0 && size == 0) {
      if (!end) return;
      append_header({0, kData, kEndStream, stream.id}, tail());
      ended(stream);
      return;
    }
    for (const Segment& segment : segments) {
      if (segment.size != 0) stream.queue.push_back(segment);
    }
    stream.queued.set(stream.queued.nbytes() + size);
    stream.closing = end;
    join_round(stream);
  }

  // Our END_STREAM is out: the stream is closed.
  void ended(Stream& stream) {
    ++state_.completed;
    if (stream.ended) {
      forget(stream.id);
    } else {
      // The rest of the request is of no use any more.
      reset(stream.id, ErrorCode::kNoError);
    }
  }

  void closed_one() {
    if (!state_.refusing || !state_.streams.empty() || state_.closed) return;
    state_.closed = true;
    close();
    state_.events.push_back({.kind = EventKind::kClosed});
  }

  void join_round(Stream& stream) {
    if (stream.queued.nbytes() == 0 || stream.send_window <= 0 || stream.in_round) return;
    stream.in_round = true;
    round_.push_back(stream.id);
  }

  // Frames queued DATA, each stream in its turn, up to what is framed at a time.
  void share() {
    const Limits& limits = state_.limits();
    std::int64_t left = limits.output_bytes;
    while (!round_.empty() && left > 0 && window_ > 0) {
      Stream* stream = state_.find(round_.front());
      round_.pop_front();
      if (stream == nullptr) continue;  // it was closed while it waited
      stream->in_round = false;
      const std::int64_t turn = round_.empty() ? left : limits.quantum_bytes;
      const std::int64_t size = std::min(
          {static_cast<std::int64_t>(stream->queued.nbytes()), stream->send_window, window_, turn});
      if (size <= 0) continue;  // its window was closed while it waited
      left -= size;
      window_ -= size;
      stream->send_window -= size;
      frame_data(*stream, static_cast<std::size_t>(size));
      finish_turn(*stream);
    }
  }

  void frame_data(Stream& stream, std::size_t size) {
    shared_ = true;
    while (size != 0) {
      const std::size_t payload = std::min(size, state_.peer_frame_size);
      size -= payload;
      stream.queued.set(stream.queued.nbytes() - payload);
      stream.unqueued += payload;
      ++state_.data_frames;
      const bool ends = stream.closing && stream.queued.nbytes() == 0 && stream.trailers == nullptr;
      append_header({payload, kData, ends ? kEndStream : std::uint8_t{0}, stream.id}, tail());
      frame_payload(stream, payload);
    }
  }

  // Takes the payload of a frame from the queue, of as many segments as it needs.
  void frame_payload(Stream& stream, std::size_t size) {
    while (size != 0) {
      Segment& next = stream.queue[stream.first];
      const Segment part{next.data, std::min(size, next.size), next.owner};
      if (part.size <= kJoined) {
        append_bytes(part, tail());
      } else {
        pieces_.push_back({.bytes = {}, .segment = part});
      }
      size -= part.size;
      next.data += part.size;
      next.size -= part.size;
      if (next.size == 0) {
        next = {};
        ++stream.first;
      }
    }
  }

  void finish_turn(Stream& stream) {
    if (stream.queued.nbytes() != 0) {
      join_round(stream);
      return;
    }
    stream.queue.clear();
    stream.first = 0;
    if (!stream.closing) {
      state_.events.push_back({.kind = EventKind::kWritable, .stream = stream.id});
      return;
    }
    if (stream.trailers != nullptr) frame_headers(stream, *stream.trailers, true);
    ended(stream);
  }

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
