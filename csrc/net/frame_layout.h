// A body that comes in many small DATA frames, received into its place by one vectored read.
//
// Many clients never send frames of more than 16 KiB. Reading each by itself costs a system call
// and a turn of the loop per frame; reading many at once into a buffer costs a copy. So the layout
// of what comes next is predicted from the frame before, and one read is spread over all of it:
//
//   socket:   [ lead | header | payload | header | payload | header | rest ...
//                 |       |         |        |         |
//   memory:    place  headers[0]  +lead  headers[1]  +lead+size ...
//
// If the headers turn out to be the predicted ones, the payload lies where it belongs. What begins
// with any other header is parsed from a copy.
#pragma once

#include <sys/uio.h>

#include "net/http2_payload.h"
#include "std.h"

namespace gpubridge::http2 {

class FrameLayout {
 public:
  FrameLayout(State& state, PayloadReceiver& payload) : state_(state), payload_(payload) {}

  // The memory of the next bytes, in their order; empty where nothing is predicted. `received` must
  // follow before anything else is received.
  std::span<const iovec> places();
  // Bytes of those places.
  [[nodiscard]] std::size_t size() const { return size_; }
  // Takes bytes that were received there; returns a copy of those that have to be parsed.
  std::vector<std::uint8_t> received(std::size_t nbytes);

 private:
  static constexpr std::size_t kMostFrames = 64;

  void add(std::uint8_t* data, std::size_t size);
  std::size_t count_predicted(std::size_t came) const;
  bool begin_predicted(std::size_t index, std::size_t nbytes);
  std::vector<std::uint8_t> copy_rest(std::size_t frames, std::size_t nbytes) const;
  std::uint8_t* header(std::size_t index) { return headers_.data() + index * kHeaderBytes; }
  [[nodiscard]] const std::uint8_t* header(std::size_t index) const {
    return headers_.data() + index * kHeaderBytes;
  }

  State& state_;
  PayloadReceiver& payload_;
  std::array<std::uint8_t, kHeaderBytes*(kMostFrames + 1)> headers_{};
  std::array<iovec, 2 * kMostFrames + 3> places_{};
  std::size_t count_ = 0;
  std::size_t size_ = 0;
  // Grows while predictions come true: where streams take turns they never do.
  std::size_t frames_ = 2;
  // The last prediction: the stream, its place, bytes of it that belong to the frame before, and
  // the size of each frame after that.
  std::uint32_t stream_ = 0;
  Place place_;
  std::size_t lead_ = 0;
  std::size_t frame_size_ = 0;
};

}  // namespace gpubridge::http2
