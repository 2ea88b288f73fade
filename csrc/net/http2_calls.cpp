#include "net/http2_calls.h"

#include <cstdint>
#include <optional>

#include "buffer_view.h"

namespace nb = nanobind;

namespace gpubridge {
namespace {

constexpr std::size_t kHeader = 9;
constexpr std::uint8_t kData = 0;
constexpr std::uint8_t kHeaders = 1;
constexpr std::uint8_t kWindowUpdate = 8;
constexpr std::uint8_t kEndStream = 0x01;
constexpr std::uint8_t kEndHeaders = 0x04;
constexpr std::uint32_t kNumber = 0x7FFFFFFFU;

struct Frame {
  std::size_t length;
  std::uint8_t kind;
  std::uint8_t flags;
  std::uint32_t stream;
  const unsigned char* payload;
};

std::uint32_t number(const unsigned char* at) {
  return (std::uint32_t{at[0]} << 24U | std::uint32_t{at[1]} << 16U | std::uint32_t{at[2]} << 8U |
          at[3]) &
         kNumber;
}

class Scan {
 public:
  Scan(const unsigned char* bytes, std::size_t position, std::size_t end, std::size_t longest)
      : bytes_(bytes), position_(position), end_(end), longest_(longest) {}

  [[nodiscard]] std::size_t position() const { return position_; }
  void go_to(std::size_t position) { position_ = position; }

  // The frame that begins here, if all of it is there and it is none that is too long.
  [[nodiscard]] std::optional<Frame> look() const {
    if (end_ - position_ < kHeader) return std::nullopt;
    const unsigned char* at = bytes_ + position_;
    const std::size_t length = std::size_t{at[0]} << 16U | std::size_t{at[1]} << 8U | at[2];
    if (length > longest_ || end_ - position_ - kHeader < length) return std::nullopt;
    return Frame{length, at[3], at[4], number(at + 5), at + kHeader};
  }

  void pass(const Frame& frame) { position_ += kHeader + frame.length; }

 private:
  const unsigned char* bytes_;
  std::size_t position_;
  std::size_t end_;
  std::size_t longest_;
};

// What WINDOW_UPDATE frames give: to the connection, and to one stream.
struct Credit {
  std::uint64_t connection = 0;
  std::uint64_t stream = 0;
  std::size_t frames = 0;
};

// Passes WINDOW_UPDATE frames of the connection and of a stream (0 for none).
void pass_updates(Scan& scan, std::uint32_t stream, Credit& credit) {
  while (const auto frame = scan.look()) {
    if (frame->kind != kWindowUpdate || frame->length != 4) return;
    const std::uint32_t increment = number(frame->payload);
    if (increment == 0 || (frame->stream != 0 && frame->stream != stream)) return;
    (frame->stream == 0 ? credit.connection : credit.stream) += increment;
    ++credit.frames;
    scan.pass(*frame);
  }
}

}  // namespace

nb::tuple scan_calls(nb::handle buffer, std::size_t position, std::size_t end, nb::handle known,
                     std::size_t longest) {
  const BufferView view(buffer, PyBUF_SIMPLE);
  if (end > view.size() || position > end) throw nb::value_error("expected places in the buffer");
  Scan scan(static_cast<const unsigned char*>(view.data()), position, end, longest);
  nb::list calls;
  Credit credit;
  while (true) {
    credit = {};
    pass_updates(scan, 0, credit);
    const auto headers = scan.look();
    if (!headers || headers->kind != kHeaders || headers->flags != kEndHeaders) break;
    const std::size_t updates_end = scan.position();
    const Credit before = credit;
    const nb::bytes block(reinterpret_cast<const char*>(headers->payload), headers->length);
    PyObject* meaning = PyDict_GetItemWithError(known.ptr(), block.ptr());
    if (meaning == nullptr) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      break;
    }
    scan.pass(*headers);
    pass_updates(scan, headers->stream, credit);
    const auto data = scan.look();
    if (!data || data->kind != kData || data->flags != kEndStream || data->length == 0 ||
        data->stream != headers->stream) {
      scan.go_to(updates_end);
      credit = before;
      break;
    }
    const std::size_t at = scan.position();
    scan.pass(*data);
    calls.append(nb::make_tuple(headers->stream, nb::handle(meaning), credit.stream,
                                credit.connection, credit.frames, at, scan.position()));
  }
  return nb::make_tuple(calls, scan.position(), credit.connection, credit.frames);
}

}  // namespace gpubridge
