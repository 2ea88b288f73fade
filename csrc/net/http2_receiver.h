// What comes in: bytes from the socket to frames, DATA to its consumer or straight to its place.
//
// The socket's owner asks `memory` where to receive, receives, and tells `received` how much came.
// Between frames that is the buffer here. Within a DATA frame of a stream that has a place
// (`receive_into`), once the buffer is used up, it is the place itself: the kernel writes the
// payload where it belongs.
//
//   buffer:  [ used | frame | frame | first part of DATA ]  then  place: [ ....rest of DATA.... ]
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "net/frame_layout.h"
#include "net/header_blocks.h"
#include "net/http2_payload.h"
#include "net/http2_sender.h"
#include "net/http2_state.h"

namespace gpubridge::http2 {

class Receiver {
 public:
  Receiver(State& state, Sender& sender);

  // Whether the client's preface is there, and the beginning of its settings.
  [[nodiscard]] bool started() const { return !starting_; }
  [[nodiscard]] PayloadReceiver& payload() { return payload_; }

  // Where the next bytes are to be received.
  Place memory();
  // Takes bytes that were received there.
  void received(std::size_t nbytes);
  // Where several frames can be received at once instead; empty where they cannot.
  std::span<const iovec> places();
  [[nodiscard]] std::size_t places_size() const { return layout_.size(); }
  void placed(std::size_t nbytes);
  // The buffer, for its views.
  [[nodiscard]] const std::shared_ptr<std::uint8_t[]>& buffer() const { return buffer_; }
  // What views of events refer to: the buffer, or what came beside its predicted place.
  [[nodiscard]] std::shared_ptr<const void> received_memory() const { return viewed_; }

  // Ends the connection with GOAWAY.
  void close(ErrorCode code, std::string_view text);
  // Our PING's payload was answered: whether it was one of the connection's own.
  void on_pong(std::span<const std::uint8_t> payload);

  bool draining = false;

 private:
  void parse(std::span<const std::uint8_t> bytes);
  void parse_frames(std::span<const std::uint8_t> bytes);
  bool parse_frame(std::span<const std::uint8_t> bytes);
  bool start(std::span<const std::uint8_t> bytes);
  void check_frame(const FrameHeader& header) const;
  void take_control(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void take_settings(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void take_ping(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void take_reset(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void take_window_update(const FrameHeader& header, std::span<const std::uint8_t> payload);
  void check_not_idle(const FrameHeader& header) const;
  void reset_faulty(const StreamFault& fault);
  void tell_untold();

  State& state_;
  Sender& sender_;
  PayloadReceiver payload_;
  HeaderBlocks blocks_;
  FrameLayout layout_;
  std::size_t size_;
  std::shared_ptr<std::uint8_t[]> buffer_;
  std::size_t begin_ = 0;  // of what is not parsed in the buffer
  std::size_t end_ = 0;
  std::size_t position_ = 0;  // of what is not parsed in the bytes being parsed
  bool starting_ = true;
  bool lent_ = false;  // `memory` has handed out a place
  std::shared_ptr<const void> viewed_;
};

}  // namespace gpubridge::http2
