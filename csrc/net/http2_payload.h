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
  void skip(std::size_t length);
  // Begins a DATA frame; `padding` is its padding's length byte. Throws ConnectionFault and
  // StreamFault; after the latter its payload is skipped.
  void begin(const FrameHeader& header, std::size_t padding);
  // Takes what came of the frame; returns how many bytes that were.
  std::size_t take(std::span<const std::uint8_t> bytes);

  // Where the socket is to receive the payload; empty where that is not worth a read of its own.
  [[nodiscard]] Place target();
  // Takes bytes that were received where `target` said.
  void received(std::size_t nbytes);
  // True if another large frame for the same place can be expected.
  [[nodiscard]] bool awaits_large() {
    const Stream* stream = state_.find(finished_);
    return stream != nullptr && size_ >= kLargeFrameBytes && stream->target.size >= kPlacedBytes;
  }

  // The stream whose place takes this frame, or took the end of the last; null for none.
  Stream* recent();
  [[nodiscard]] std::size_t frame_size() const { return size_; }
  // Bytes that a stream may still bring: by the windows, and by its content-length.
  [[nodiscard]] std::size_t allowed(const Stream& stream) const;
  // Takes whole frames of equal size, received into their stream's place.
  void take_frames(Stream& stream, std::size_t count, std::size_t size);

  void receive_into(Stream& stream, Place place);
  void consume(Stream& stream, std::int64_t nbytes) {
    stream.unconsumed = std::max<std::int64_t>(0, stream.unconsumed - nbytes);
    replenish(stream);
  }

 private:
  void fill(Stream& stream, std::size_t size);
  void end_short(Stream& stream);
  void check_connection(const FrameHeader& header, std::size_t padding) const;
  void check_closed(std::uint32_t id) const;
  void check_stream(Stream& stream, std::size_t length, std::size_t size, bool ends) const;
  void replenish_connection();
  void replenish(Stream& stream);
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
