// Numbers of JSON texts: doubles read exactly, and written as Triton writes them.
#pragma once

#include "request/json_cursor.h"

namespace gpubridge {

// The nearest double; nothing where that is infinite.
[[nodiscard]] std::optional<double> to_double(const JsonNumber& number);

// A number takes no more characters.
inline constexpr std::size_t kLongestNumber = 32;

// Writes a number with the shortest digits that give the same double: without an exponent from 1e-6
// up to below 1e21, and as a float even where it is whole, so that a reader sees one. Those that
// are not finite are NaN, Infinity and -Infinity. Returns the end.
[[nodiscard]] char* put_json_number(char* at, double value);

}  // namespace gpubridge
