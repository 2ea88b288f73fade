#include "net/http1_reader.h"

namespace gpubridge::http1 {
namespace {

constexpr unsigned kSizeDigits = 15;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char letter = static_cast<char>(c | 0x20);
  return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

}  // namespace

Reader::Step Reader::step(const char*& at, const char* end) {
  while (true) {
    switch (state_) {
      case State::kHead:
        return read_head(at, end);
      case State::kBody:
        return read_piece(at, end, State::kHead);
      case State::kChunk:
        if (missing_ != 0) return read_piece(at, end, State::kAfterChunk);
        state_ = State::kAfterChunk;
        break;
      case State::kTrailer:
        return read_trailer(at, end);
      default:
        if (at == end) return Step::kMore;
        if (read_framing(*at++) == Step::kFault) return Step::kFault;
    }
  }
}

Reader::Step Reader::read_head(const char*& at, const char* end) {
  const HeadParser::Result result = parser_.parse(at, end);
  if (result == HeadParser::Result::kMore) return Step::kMore;
  if (result == HeadParser::Result::kFault) return fail(parser_.fault());
  head_ = parser_.take();
  missing_ = head_.length;
  framing_ = 0;
  digits_ = 0;
  state_ = head_.chunked ? State::kChunkSize : State::kBody;
  return Step::kHead;
}

Reader::Step Reader::read_piece(const char*& at, const char* end, State next) {
  if (missing_ == 0) {
    state_ = next;
    return Step::kEnd;
  }
  const auto here = static_cast<std::size_t>(
      std::min<std::uint64_t>(missing_, static_cast<std::size_t>(end - at)));
  if (here == 0) return Step::kMore;
  body_ = {at, here};
  at += here;
  missing_ -= here;
  framing_ = 0;
  return Step::kBody;
}

Reader::Step Reader::read_trailer(const char*& at, const char* end) {
  const HeadParser::Result result = parser_.parse(at, end);
  if (result == HeadParser::Result::kMore) return Step::kMore;
  if (result == HeadParser::Result::kFault) return fail(parser_.fault());
  parser_ = HeadParser();
  state_ = State::kHead;
  return Step::kEnd;
}

Reader::Step Reader::read_framing(char c) {
  if (++framing_ > kHeadLimit) return fail(Fault::kHeadTooLong);
  switch (state_) {
    case State::kChunkSize:
      if (const int digit = hex_digit(c); digit >= 0 && digits_ < kSizeDigits) {
        missing_ = missing_ * 16 + static_cast<unsigned>(digit);
        ++digits_;
        return Step::kMore;
      }
      if (digits_ == 0 || (c != ';' && c != '\r')) return fail(Fault::kChunkSize);
      state_ = c == ';' ? State::kChunkExtension : State::kChunkLineEnd;
      return Step::kMore;
    case State::kChunkExtension:
      // Its contents are ignored.
      if (c == '\r') {
        state_ = State::kChunkLineEnd;
      } else if ((static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7f) {
        return fail(Fault::kChunkSize);
      }
      return Step::kMore;
    case State::kChunkLineEnd:
      if (c != '\n') return fail(Fault::kLineEnd);
      if (missing_ == 0) {
        parser_.begin_trailer();
        state_ = State::kTrailer;
      } else {
        state_ = State::kChunk;
      }
      return Step::kMore;
    case State::kAfterChunk:
      if (c != '\r') return fail(Fault::kChunkEnd);
      state_ = State::kChunkEnd;
      return Step::kMore;
    default:
      if (c != '\n') return fail(Fault::kChunkEnd);
      digits_ = 0;
      state_ = State::kChunkSize;
      return Step::kMore;
  }
}

Reader::Step Reader::fail(Fault fault) {
  fault_ = fault;
  return Step::kFault;
}

}  // namespace gpubridge::http1
