// How much one connection may ask of the server.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubridge::http2 {

// The first five are told to the peer.
struct Limits {
  // Streams open at once; further ones get REFUSED_STREAM.
  std::int64_t max_concurrent_streams = 256;
  // The largest payload of a frame. Large, so that a large message needs few frames and can be
  // received straight into its place.
  std::int64_t max_frame_size = 1 << 22;
  // Bytes of DATA that a peer may send ahead: on a stream whose consumer holds, on all streams.
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
  // completed stream allows one more.
  std::int64_t resets = 500;
  std::int64_t resets_per_second = 100;
  // Frames that bring nothing forward (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA, unknown
  // types): at once, and regained per second. Each stream completed and each DATA frame sent allows
  // four more.
  std::int64_t idle_frames = 20'000;
  std::int64_t idle_frames_per_second = 2'000;
  // Streams reset by us whose late frames are still forgiven, and for how long they are.
  std::int64_t reset_memory = 1000;
  std::int64_t reset_grace_seconds = 30;

  // Throws std::invalid_argument where a limit is outside of what the protocol allows.
  void check() const;
};

}  // namespace gpubridge::http2
