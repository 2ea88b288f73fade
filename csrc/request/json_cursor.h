// A text of JSON, read from its start on by the grammar of RFC 8259.
#pragma once

#include "little_endian.h"
#include "request/byte_words.h"
#include "std.h"

namespace gpubridge {

// A number's text, taken apart.
struct JsonNumber {
  std::string_view whole;
  bool negative = false;
  bool integer = true;        // Neither a fraction nor an exponent.
  std::uint64_t digits = 0;   // All of them as one integer, if that is exact.
  std::size_t count = 0;      // Of the digits; leading zeros of a few may count.
  std::int64_t exponent = 0;  // The power of ten that the last digit stands for.

  [[nodiscard]] bool exact() const { return count <= kExactDigits; }

  // Nothing where it is no integer of that type, which has 64 bits.
  template <typename Integer>
  [[nodiscard]] std::optional<Integer> as() const {
    static_assert(sizeof(Integer) == sizeof digits);
    if (!integer) return std::nullopt;
    if (!exact()) return as_text<Integer>();
    constexpr std::uint64_t kMost = std::numeric_limits<Integer>::max();
    const std::uint64_t most = !negative ? kMost : std::is_signed_v<Integer> ? kMost + 1 : 0;
    if (digits > most) return std::nullopt;
    return static_cast<Integer>(negative ? 0 - digits : digits);
  }

  static constexpr std::size_t kExactDigits = 19;

 private:
  template <typename Integer>
  [[nodiscard]] std::optional<Integer> as_text() const {
    Integer value{};
    const char* end = whole.data() + whole.size();
    const auto read = std::from_chars(whole.data(), end, value);
    if (read.ec != std::errc() || read.ptr != end) return std::nullopt;
    return value;
  }
};

// Every reading function says whether it found what it is for.
class JsonCursor {
 public:
  explicit JsonCursor(std::string_view text) : text_(text) {}

  // Arrays and objects in each other.
  static constexpr int kDeepest = 64;

  static bool is_digit(char letter) { return letter >= '0' && letter <= '9'; }

  static bool is_space(char letter) {
    return letter == ' ' || letter == '\n' || letter == '\t' || letter == '\r';
  }

  [[nodiscard]] bool at_end() const { return at_ >= text_.size(); }
  [[nodiscard]] std::size_t position() const { return at_; }
  // The next character; NUL at the end.
  [[nodiscard]] char peek() const { return at_end() ? '\0' : text_[at_]; }
  [[nodiscard]] std::string_view from(std::size_t start) const {
    return text_.substr(start, at_ - start);
  }

  char next() { return at_end() ? '\0' : text_[at_++]; }

  bool take(char wanted) {
    if (at_end() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  void skip_space() {
    while (!at_end() && text_[at_] <= ' ' && is_space(text_[at_])) ++at_;
  }

  // Moves behind a string, whose opening quote has been taken; nothing where it does not end.
  [[nodiscard]] std::optional<std::string_view> raw_string() {
    const std::size_t start = at_;
    for (;; at_ += 2) {
      at_ = find_byte(text_, at_, [](ByteWord word) { return word.is('"') | word.is('\\'); });
      if (at_ >= text_.size()) return std::nullopt;
      if (text_[at_] == '"') return text_.substr(start, at_++ - start);
    }
  }

  // Moves behind an array or object whose opening bracket has been taken. Says nothing about what
  // is in it.
  [[nodiscard]] bool skip_nested() {
    for (int depth = 1;;) {
      at_ = find_byte(text_, at_, [](ByteWord word) {
        // A bracket and a brace differ in one bit. Another character is passed over.
        const ByteWord brace = word.with(0x20);
        return word.is('"') | brace.is('{') | brace.is('}');
      });
      if (at_end()) return false;
      const char letter = next();
      if (letter == '"') {
        if (!raw_string()) return false;
      } else if (letter == '[' || letter == '{') {
        if (++depth > kDeepest) return false;
      } else if (letter == ']' || letter == '}') {
        if (--depth == 0) return true;
      }
    }
  }

  [[nodiscard]] std::optional<JsonNumber> number() {
    JsonNumber number;
    const char* const end = text_.data() + text_.size();
    const char* const begin = text_.data() + std::min(at_, text_.size());
    number.negative = begin != end && *begin == '-';
    const char* const first = begin + (number.negative ? 1 : 0);
    const char* at = take_digits(first, end, number.digits);
    if (at == first || (*first == '0' && at - first > 1)) return std::nullopt;
    number.count = static_cast<std::size_t>(at - first);
    if (at != end && *at == '.') {
      const char* const fraction = ++at;
      at = take_many_digits(fraction, end, number.digits);
      if (at == fraction) return std::nullopt;
      number.count += static_cast<std::size_t>(at - fraction);
      number.exponent = fraction - at;
      number.integer = false;
    }
    if (at != end && (*at == 'e' || *at == 'E')) {
      at = take_power(at + 1, end, number.exponent);
      if (at == nullptr) return std::nullopt;
      number.integer = false;
    }
    if (!number.exact()) number.count -= leading_zeros(first, at);
    number.whole = {begin, static_cast<std::size_t>(at - begin)};
    at_ += number.whole.size();
    return number;
  }

 private:
  // Beyond all numbers, with whatever digits.
  static constexpr std::int64_t kHugePower = std::int64_t{1} << 50U;

  // Moves behind digits, each of which becomes the last one of `digits`.
  static const char* take_digits(const char* at, const char* end, std::uint64_t& digits) {
    std::uint64_t value = digits;
    for (; at != end && is_digit(*at); ++at) value = value * 10 + static_cast<unsigned>(*at - '0');
    digits = value;
    return at;
  }

  // The same, which is fast for many.
  static const char* take_many_digits(const char* at, const char* end, std::uint64_t& digits) {
    // Eight together: pairs of them, then fours.
    for (; static_cast<std::size_t>(end - at) >= sizeof(std::uint64_t); at += 8) {
      auto word = get_number<std::uint64_t>(at);
      const std::uint64_t carried = (word + 0x0606060606060606U) & 0xF0F0F0F0F0F0F0F0U;
      if (((word & 0xF0F0F0F0F0F0F0F0U) | carried >> 4U) != 0x3333333333333333U) break;
      word = (word & 0x0F0F0F0F0F0F0F0FU) * 2561 >> 8U;
      word = (word & 0x00FF00FF00FF00FFU) * 6553601 >> 16U;
      word = (word & 0x0000FFFF0000FFFFU) * 42949672960001 >> 32U;
      digits = digits * 100000000 + word;
    }
    return take_digits(at, end, digits);
  }

  // Adds the power behind an `e` to an exponent; a null pointer where there is none.
  static const char* take_power(const char* at, const char* end, std::int64_t& exponent) {
    const bool down = at != end && *at == '-';
    if (down || (at != end && *at == '+')) ++at;
    const char* const first = at;
    std::int64_t power = 0;
    for (; at != end && is_digit(*at); ++at) power = std::min(power * 10 + (*at - '0'), kHugePower);
    exponent += down ? -power : power;
    return at == first ? nullptr : at;
  }

  // Of digits, with a point between them perhaps; the text may end behind them.
  static std::size_t leading_zeros(const char* at, const char* end) {
    std::size_t zeros = 0;
    for (; at != end && (*at == '0' || *at == '.'); ++at) zeros += *at == '0' ? 1 : 0;
    return zeros;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace gpubridge
