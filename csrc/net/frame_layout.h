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
  std::span<const iovec> places() {
    count_ = size_ = 0;
    const Stream* stream = payload_.recent();
    const std::size_t size = payload_.frame_size();
    // Shorter frames are cheaper to receive through the buffer, many in a read.
    if (stream == nullptr || size < kPlacedBytes || size >= kLargeFrameBytes) return {};
    const std::size_t lead = payload_.left();
    const std::size_t target = stream->target.size;
    if (stream->throttled || lead >= target) return {};
    // Of the frames behind this one, no more is taken for the stream's than it may bring.
    const std::size_t most = lead + std::min(target - lead, payload_.allowed(*stream));
    const std::size_t whole = std::min((most - lead) / size, frames_);
    std::size_t end = lead + whole * size;
    const std::size_t rest = std::min(size, most - end);
    // Behind whole frames a short end of the place costs no read of its own.
    if (whole < frames_ && (whole != 0 || rest >= kPlacedBytes)) end += rest;
    if (end == lead) return {};
    stream_ = stream->id;
    place_ = stream->target;
    place_.size = end;
    lead_ = lead;
    frame_size_ = size;
    add(place_.data, lead);
    std::size_t index = 0;
    for (std::size_t at = lead; at < end; at += size) {
      add(header(index++), kHeaderBytes);
      add(place_.data + at, std::min(size, end - at));
    }
    return std::span(places_).first(count_);
  }

  // Bytes of those places.
  [[nodiscard]] std::size_t size() const { return size_; }
  // Takes bytes that were received there; returns a copy of those that have to be parsed.
  std::vector<std::uint8_t> received(std::size_t nbytes) {
    const Place place = std::exchange(place_, {});  // outlives what is parsed
    if (lead_ != 0) {
      const std::size_t taken = std::min(lead_, nbytes);
      payload_.received(taken);
      nbytes -= taken;
    }
    const std::size_t step = kHeaderBytes + frame_size_;
    const std::size_t came = nbytes / step;
    const std::size_t right = count_predicted(came);
    if (right < came) {
      frames_ = std::max<std::size_t>(1, frames_ / 2);
    } else if (came == frames_) {
      frames_ = std::min(2 * came, kMostFrames);
    }
    const std::size_t left = nbytes - right * step;
    Stream* stream = state_.find(stream_);
    if (right != 0 && stream != nullptr) payload_.take_frames(*stream, right, frame_size_);
    if (left == 0) return {};
    place_ = place;
    const std::size_t space = place.size - lead_ - right * frame_size_;
    if (left > kHeaderBytes && left - kHeaderBytes <= std::min(frame_size_, space) &&
        begin_predicted(right, left - kHeaderBytes)) {
      payload_.received(left - kHeaderBytes);
      place_ = {};
      return {};
    }
    if (stream != nullptr) stream->copied += left;
    auto rest = copy_rest(right, left);
    place_ = {};
    return rest;
  }

 private:
  static constexpr std::size_t kMostFrames = 64;

  void add(std::uint8_t* data, std::size_t size) {
    if (size == 0) return;
    places_[count_++] = {data, size};
    size_ += size;
  }

  // Returns how many of the frames that came have the predicted header, up to the first other one.
  std::size_t count_predicted(std::size_t came) const {
    for (std::size_t index = 0; index < came; ++index) {
      const FrameHeader there = read_header(header(index));
      if (there.type != kData || there.flags != 0 || there.length != frame_size_ ||
          there.stream != stream_) {
        return index;
      }
    }
    return came;
  }

  // Begins with the frame of a header if it is usual DATA of the stream with as much payload.
  [[nodiscard]] bool begin_predicted(std::size_t index, std::size_t nbytes) {
    const Stream* stream = state_.find(stream_);
    const FrameHeader there = read_header(header(index));
    if (stream == nullptr || stream->target.size == 0 || stream->ended || there.type != kData ||
        there.stream != stream_ || (there.flags & ~kEndStream) != 0) {
      return false;
    }
    const auto most = std::min(static_cast<std::size_t>(state_.limits().max_frame_size),
                               payload_.allowed(*stream));
    if (there.length < nbytes || there.length > most) return false;
    if (there.flags != 0 && stream->expected.value_or(there.length) != there.length) return false;
    payload_.begin(there, 0);
    return true;
  }

  // Returns a copy of what came behind so many frames, as it was on the wire.
  std::vector<std::uint8_t> copy_rest(std::size_t frames, std::size_t nbytes) const {
    std::vector<std::uint8_t> rest;
    rest.reserve(nbytes);
    const auto append = [&rest, nbytes](const std::uint8_t* data, std::size_t size) {
      rest.insert(rest.end(), data, data + std::min(size, nbytes - rest.size()));
    };
    std::size_t index = frames;
    for (std::size_t at = lead_ + frames * frame_size_; rest.size() < nbytes; at += frame_size_) {
      append(header(index++), kHeaderBytes);
      append(place_.data + at, std::min(frame_size_, place_.size - at));
    }
    return rest;
  }

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
