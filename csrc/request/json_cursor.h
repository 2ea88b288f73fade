// A text of JSON, read from its start on by the grammar of RFC 8259.
#pragma once

#include "std.h"

namespace gpubridge {

// A number's text, taken apart.
struct JsonNumber {
  std::string_view whole;
  bool negative = false;
  bool integer = true;  // Neither a fraction nor an exponent.

  // Nothing where it is no integer of that type.
  template <typename Integer>
  [[nodiscard]] std::optional<Integer> as() const {
    if (!integer) return std::nullopt;
    if (whole == "-0") return Integer{0};
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

  [[nodiscard]] bool digits() {
    if (!is_digit(peek())) return false;
    while (is_digit(peek())) ++at_;
    return true;
  }

  // Moves behind a string, whose opening quote has been taken; nothing where it does not end.
  [[nodiscard]] std::optional<std::string_view> raw_string() {
    const std::size_t start = at_;
    for (; at_ < text_.size(); ++at_) {
      if (text_[at_] == '"') return text_.substr(start, at_++ - start);
      if (text_[at_] == '\\') ++at_;
    }
    return std::nullopt;
  }

  // Moves behind an array or object whose opening bracket has been taken. Says nothing about what
  // is in it.
  [[nodiscard]] bool skip_nested() {
    for (int depth = 1; !at_end();) {
      const char letter = next();
      if (letter == '"') {
        if (!raw_string()) return false;
      } else if (letter == '[' || letter == '{') {
        if (++depth > kDeepest) return false;
      } else if (letter == ']' || letter == '}') {
        if (--depth == 0) return true;
      }
    }
    return false;
  }

  [[nodiscard]] std::optional<JsonNumber> number() {
    JsonNumber number;
    const std::size_t start = at_;
    number.negative = take('-');
    if (take('0') ? is_digit(peek()) : !digits()) return std::nullopt;
    if (take('.')) {
      number.integer = false;
      if (!digits()) return std::nullopt;
    }
    if (take('e') || take('E')) {
      number.integer = false;
      if (!take('-')) take('+');
      if (!digits()) return std::nullopt;
    }
    number.whole = from(start);
    return number;
  }

 private:
  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace gpubridge
