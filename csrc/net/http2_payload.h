// DATA frames: payload to its consumer or into its place, and the windows it comes through.
#pragma once

#include "net/http2_sender.h"
#include "net/http2_state.h"
#include "std.h"

namespace gpubridge::http2 {

// Less than this is received into the connection's own buffer even if it has a place: what follows
// then comes in the same read.
constexpr std::size_t kPlacedBytes = std::size_t{1} << 12U;
// A frame as large is worth a read of its header alone, so that nothing of it is copied.
constexpr std::size_t kLargeFrameBytes = std::size_t{1} << 16U;

class PayloadReceiver {
 public:
  PayloadReceiver(State& state, Sender& sender)
      : state_(state), sender_(sender), window_(state.limits().connection_window) {}

  // True if we are within a frame whose payload or padding has not all come.
  [[nodiscard]] bool within_frame() const { return left_ != 0 || padding_ != 0; }
  // Bytes of this frame's payload to come.
  [[nodiscard]] std::size_t left() const { return left_; }

  // The stream whose frame is cut short if nothing more comes; 0 for none.
  [[nodiscard]] std::uint32_t cut_short() const { return left_ != 0 ? stream_ : 0; }

  // Begins a frame whose payload is dropped.
  void skip(std::size_t length) {
    left_ = length;
    padding_ = 0;
    stream_ = 0;
    ends_ = false;
  }

  // Begins a DATA frame; `padding` is its padding's length byte. Throws ConnectionFault and
  // StreamFault; after the latter its payload is skipped.
  void begin(const FrameHeader& header, std::size_t padding) {
    check_connection(header, padding);
    const bool padded = (header.flags & kPadded) != 0;
    const std::size_t size = padded ? header.length - 1 - padding : header.length;
    skip(size);
    padding_ = padding;
    window_ -= static_cast<std::int64_t>(header.length);
    replenish_connection();
    const bool ends = (header.flags & kEndStream) != 0;
    if (size == 0 && !ends) state_.spend_idle_frame();
    Stream* stream = state_.find(header.stream);
    if (stream == nullptr) {
      check_closed(header.stream);
      return;
    }
    check_stream(*stream, header.length, size, ends);
    stream->window -= static_cast<std::int64_t>(header.length);
    if (stream->throttled) stream->unconsumed += static_cast<std::int64_t>(size);
    if (ends) stream->ended = true;
    // Not if the windows let all of a place come: to its peer an update is a packet to be read.
    if (stream->target.size == 0 || static_cast<std::int64_t>(stream->target.size) >
                                        stream->window + static_cast<std::int64_t>(size)) {
      replenish(*stream);
    }
    if (stream->access != nullptr) stream->access->received += size;
    stream_ = stream->id;
    ends_ = ends;
    size_ = header.length;
    finished_ = 0;
    if (size == 0 && ends) end_short(*stream);
  }

  // Takes what came of the frame; returns how many bytes that were.
  std::size_t take(std::span<const std::uint8_t> bytes) {
    std::size_t used = 0;
    while (left_ != 0 && used < bytes.size()) {
      std::size_t size = std::min(left_, bytes.size() - used);
      const auto part = bytes.subspan(used);
      Stream* stream = state_.find(stream_);
      if (stream == nullptr) {
        left_ -= size;
      } else if (stream->target.size == 0) {
        left_ -= size;
        stream->reader.take(part.first(size), ends_ && left_ == 0);
      } else {
        size = std::min(size, stream->target.size);
        left_ -= size;
        std::memcpy(stream->target.data, part.data(), size);
        stream->copied += size;
        fill(*stream, size);
      }
      used += size;
    }
    if (left_ == 0) {
      stream_ = 0;
      const std::size_t size = std::min(padding_, bytes.size() - used);
      padding_ -= size;
      used += size;
    }
    return used;
  }

  // Where the socket is to receive the payload; empty where that is not worth a read of its own.
  [[nodiscard]] Place target() {
    const Stream* stream = state_.find(stream_);
    if (stream == nullptr) return {};
    Place place = stream->target;
    place.size = std::min(place.size, left_);
    return place.size >= kPlacedBytes ? place : Place{};
  }

  // Takes bytes that were received where `target` said.
  void received(std::size_t nbytes) {
    left_ -= nbytes;
    const std::uint32_t id = stream_;
    Stream* stream = state_.find(id);
    if (stream != nullptr) fill(*stream, nbytes);
    if (left_ == 0) {
      stream_ = 0;
      finished_ = id;
    }
  }

  // True if another large frame for the same place can be expected.
  [[nodiscard]] bool awaits_large() {
    const Stream* stream = state_.find(finished_);
    return stream != nullptr && size_ >= kLargeFrameBytes && stream->target.size >= kPlacedBytes;
  }

  // The stream whose place takes this frame, or took the end of the last; null for none.
  Stream* recent() {
    if (!within_frame()) return state_.find(finished_);
    if (padding_ != 0 || ends_) return nullptr;
    return state_.find(stream_);
  }

  [[nodiscard]] std::size_t frame_size() const { return size_; }
  // Bytes that a stream may still bring: by the windows, and by its content-length.
  [[nodiscard]] std::size_t allowed(const Stream& stream) const {
    const auto window =
        static_cast<std::uint64_t>(std::max<std::int64_t>(0, std::min(window_, stream.window)));
    return static_cast<std::size_t>(std::min(window, stream.expected.value_or(window)));
  }

  // Takes whole frames of equal size, received into their stream's place.
  void take_frames(Stream& stream, std::size_t count, std::size_t size) {
    const std::size_t nbytes = count * size;
    skip(0);
    window_ -= static_cast<std::int64_t>(nbytes);
    replenish_connection();
    stream.window -= static_cast<std::int64_t>(nbytes);
    if (stream.expected) *stream.expected -= nbytes;
    if (static_cast<std::int64_t>(stream.target.size) >
        stream.window + static_cast<std::int64_t>(nbytes)) {
      replenish(stream);
    }
    finished_ = stream.id;
    fill(stream, nbytes);
  }

  void receive_into(Stream& stream, Place place) {
    stream.target = std::move(place);
    std::int64_t missing =
        std::min(static_cast<std::int64_t>(stream.target.size), kMaxWindow) - stream.window;
    if (stream_ == stream.id) missing -= static_cast<std::int64_t>(left_);
    if (missing > 0 && !stream.ended) grant(stream, missing);
  }

  void consume(Stream& stream, std::int64_t nbytes) {
    stream.unconsumed = std::max<std::int64_t>(0, stream.unconsumed - nbytes);
    replenish(stream);
  }

 private:
  // By how much a receive window is to be widened now: nothing until half of it is to be given
  // back, so that small messages cost no WINDOW_UPDATE each.
  static std::int64_t credit_due(std::int64_t full, std::int64_t window, std::int64_t unconsumed) {
    const std::int64_t due = full - window - unconsumed;
    return 2 * due >= full ? due : 0;
  }

  // Notes that so many bytes of a stream's place have come.
  void fill(Stream& stream, std::size_t size) {
    if (stream.throttled) {
      stream.unconsumed =
          std::max<std::int64_t>(0, stream.unconsumed - static_cast<std::int64_t>(size));
    }
    stream.reader.pass(size);
    const bool ends = ends_ && left_ == 0;
    if (size == stream.target.size) {
      stream.target = {};
      replenish(stream);
      state_.events.push_back({.kind = EventKind::kFilled, .stream = stream.id, .end = ends});
    } else if (ends) {
      end_short(stream);
    } else {
      stream.target.data += size;
      stream.target.size -= size;
    }
  }

  // Tells of an end that comes without bytes, or before the place is full.
  void end_short(Stream& stream) {
    stream.target = {};
    stream_ = 0;
    stream.reader.take({}, true);
  }

  void check_connection(const FrameHeader& header, std::size_t padding) const {
    if (header.stream == 0) {
      throw ConnectionFault(ErrorCode::kProtocolError,
                            "DATA: expected a stream, got the connection");
    }
    if ((header.flags & kPadded) != 0 && header.length < padding + 1) {
      throw ConnectionFault(ErrorCode::kProtocolError, "DATA: expected padding within its ",
                            header.length, " bytes, got ", padding);
    }
    if (static_cast<std::int64_t>(header.length) > window_) {
      throw ConnectionFault(ErrorCode::kFlowControlError, "DATA: expected at most ", window_,
                            " bytes on the connection, got ", header.length);
    }
  }

  // Forgives DATA of a stream that we have just reset, no other without a stream.
  void check_closed(std::uint32_t id) const {
    if (state_.forgiven.holds(id, state_.now)) return;
    const bool closed = (id & 1U) != 0 && id <= state_.highest_id;
    throw ConnectionFault(closed ? ErrorCode::kStreamClosed : ErrorCode::kProtocolError,
                          "DATA: expected an open stream, got ", id, ", which is ",
                          (closed ? "closed" : "idle"));
  }

  // Checks a frame's header against its stream's state, window and content-length.
  void check_stream(Stream& stream, std::size_t length, std::size_t size, bool ends) const {
    if (stream.ended) throw StreamFault{stream.id, ErrorCode::kStreamClosed};
    if (static_cast<std::int64_t>(length) > stream.window) {
      throw StreamFault{stream.id, ErrorCode::kFlowControlError};
    }
    if (!stream.expected) return;
    if (size > *stream.expected || (ends && size != *stream.expected)) {
      throw StreamFault{stream.id, ErrorCode::kProtocolError};
    }
    *stream.expected -= size;
  }

  void replenish_connection() {
    // Also for throttled streams: a slow one must not stop its neighbours.
    const std::int64_t due = credit_due(state_.limits().connection_window, window_, 0);
    if (due <= 0) return;
    window_ += due;
    sender_.window_update(0, due);
    sender_.check_answers();
  }

  void replenish(Stream& stream) {
    // To its peer an update is a packet to be read.
    if (static_cast<std::int64_t>(std::min<std::uint64_t>(stream.reader.wanted(), kMaxWindow)) <
        stream.window) {
      return;
    }
    const std::int64_t due =
        credit_due(state_.limits().stream_window, stream.window, stream.unconsumed);
    if (due > 0 && !stream.ended) grant(stream, due);
  }

  void grant(Stream& stream, std::int64_t credit) {
    stream.window += credit;
    sender_.window_update(stream.id, credit);
  }

  State& state_;
  Sender& sender_;
  std::int64_t window_;  // what the peer may still send on the connection
  std::size_t left_ = 0;
  std::size_t padding_ = 0;
  std::uint32_t stream_ = 0;  // of the frame; 0 if its payload is dropped
  bool ends_ = false;
  std::size_t size_ = 0;        // the length of the frame that came last
  std::uint32_t finished_ = 0;  // whose place took the end of it
};

}  // namespace gpubridge::http2
