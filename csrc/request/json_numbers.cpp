#include "request/json_numbers.h"

#include <cmath>
#include <cstdlib>

#include "little_endian.h"

namespace gpubridge {
namespace {

constexpr std::array<double, 23> kPowersOfTen = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                                 1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                                 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
constexpr std::uint64_t kExactIntegers = std::uint64_t{1} << 53U;
// Whatever is below that power of ten is nearer to zero than to any other double.
constexpr std::int64_t kZeroBelow = -330;
constexpr int kMostDigits = 21;
constexpr int kMostZeros = 5;

std::optional<double> finite(double value) {
  if (!std::isfinite(value)) return std::nullopt;
  return value;
}

// The process keeps the numeric locale "C", as Python needs it, too.
std::optional<double> read_slowly(std::string_view text) {
  const std::string copy(text);
  return finite(std::strtod(copy.c_str(), nullptr));
}

// By the standard library where it reads doubles: libc++ does from version 20 on. What it finds
// beyond the range of normal doubles is for the other way, which knows zero from infinity.
template <typename Number>
std::optional<double> read(std::string_view text) {
  if constexpr (requires(const char* at, Number& value) { std::from_chars(at, at, value); }) {
    Number value{};
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec == std::errc()) return finite(value);
  }
  return read_slowly(text);
}

char* put_zeros(char* at, int count) { return std::fill_n(at, count, '0'); }

// Writes digits, the first of which stands for `exponent` powers of ten.
char* put_digits(char* at, std::string_view digits, int exponent) {
  const int size = static_cast<int>(digits.size());
  const int whole = exponent + 1;
  if (size <= whole && whole <= kMostDigits) {
    return put_bytes(put_zeros(put_bytes(at, digits), whole - size), ".0");
  }
  if (whole > 0 && whole <= kMostDigits) {
    const auto cut = static_cast<std::size_t>(whole);
    at = put_bytes(put_bytes(at, digits.substr(0, cut)), ".");
    return put_bytes(at, digits.substr(cut));
  }
  if (whole <= 0 && -whole <= kMostZeros) {
    return put_bytes(put_zeros(put_bytes(at, "0."), -whole), digits);
  }
  *at++ = digits[0];
  if (size > 1) at = put_bytes(put_bytes(at, "."), digits.substr(1));
  *at++ = 'e';
  return std::to_chars(at, at + kLongestNumber, exponent).ptr;
}

}  // namespace

std::optional<double> to_double(const JsonNumber& number) {
  if (number.exact() && number.digits <= kExactIntegers && number.exponent >= -22 &&
      number.exponent <= 22) {
    // One operation on doubles rounds correctly.
    const auto value = static_cast<double>(number.digits);
    const double power = kPowersOfTen[static_cast<std::size_t>(std::abs(number.exponent))];
    const double scaled = number.exponent < 0 ? value / power : value * power;
    return number.negative ? -scaled : scaled;
  }
  if (number.exponent + static_cast<std::int64_t>(number.count) < kZeroBelow) {
    return number.negative ? -0.0 : 0.0;
  }
  return read<double>(number.whole);
}

char* put_json_number(char* at, double value) {
  if (std::isnan(value)) return put_bytes(at, "NaN");
  if (std::signbit(value)) *at++ = '-';
  value = std::abs(value);
  if (std::isinf(value)) return put_bytes(at, "Infinity");
  if (value <= static_cast<double>(kExactIntegers)) {
    const auto whole = static_cast<std::uint64_t>(value);
    if (static_cast<double>(whole) == value) {
      return put_bytes(std::to_chars(at, at + kLongestNumber, whole).ptr, ".0");
    }
  }
  // One digit, a point and the others, and an exponent with its sign.
  std::array<char, kLongestNumber> text;
  const char* const end =
      std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::scientific)
          .ptr;
  const char* mark = end - sizeof("e+00") + 1;
  if (*mark != 'e') --mark;
  int exponent = 0;
  std::from_chars(mark + 2, end, exponent);
  text[1] = text[0];
  const char* const digits = mark - text.data() > 1 ? text.data() + 1 : text.data();
  return put_digits(at, {digits, mark}, mark[1] == '-' ? -exponent : exponent);
}

}  // namespace gpubridge
