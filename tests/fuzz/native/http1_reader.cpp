// HTTP/1 messages: in pieces of any size they are read as they are at once.
#include "net/http1_reader.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fuzz.h"

namespace {

using gpubridge::fuzz::expect;
using gpubridge::http1::Head;
using gpubridge::http1::Reader;

// What a reader makes of bytes, as one text: bodies are joined.
class Reading {
 public:
  // False when nothing after it can be read.
  bool take(std::string_view bytes) {
    const char* at = bytes.data();
    const char* end = at + bytes.size();
    while (true) {
      const char* before = at;
      const Reader::Step step = reader_.step(at, end);
      expect(at >= before && at <= end, "the position stays in the bytes");
      if (step == Reader::Step::kMore) {
        expect(at == end, "more is asked for when all is taken");
        return true;
      }
      if (step == Reader::Step::kHead) {
        note(reader_.take_head());
      } else if (step == Reader::Step::kBody) {
        const std::string_view body = reader_.body();
        expect(body.data() >= bytes.data() && body.data() + body.size() <= end, "a body is a view");
        text_.append(body);
      } else if (step == Reader::Step::kEnd) {
        text_ += "|end|";
      } else {
        text_ += "|fault " + std::to_string(static_cast<int>(reader_.fault())) + "|";
        return false;
      }
    }
  }

  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  void note(const Head& head) {
    text_ += "|";
    text_.append(head.method()).append(" ").append(head.target());
    for (const std::string_view name : {"host", "content-length", "accept-encoding", "x"}) {
      text_ += " ";
      if (const auto value = head.field(name)) text_.append(*value);
    }
    text_ += " " + std::to_string(head.length);
    for (const bool flag : {head.chunked, head.coded, head.close, head.modern, head.expects}) {
      text_ += flag ? '1' : '0';
    }
    text_ += "|";
  }

  Reader reader_;
  std::string text_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  std::uint32_t cuts = input.byte() | 1U;
  const std::string_view text = input.text();
  Reading whole;
  Reading pieces;
  const bool whole_goes_on = whole.take(text);
  bool goes_on = true;
  for (std::size_t at = 0; at < text.size() && goes_on;) {
    cuts = cuts * 1664525U + 1013904223U;
    const std::size_t length = std::min<std::size_t>(1 + (cuts >> 24U) % 23, text.size() - at);
    // A buffer of its own, so that reading beyond it is seen.
    const std::string piece(text.substr(at, length));
    goes_on = pieces.take(piece);
    at += length;
  }
  expect(goes_on == whole_goes_on, "pieces are refused where the whole is");
  expect(pieces.text() == whole.text(), "pieces mean what the whole means");
  return 0;
}
