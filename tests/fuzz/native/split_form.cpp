// Long forms of gRPC requests: what is taken out lies in the form, and nothing is left to take out.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fuzz.h"
#include "request/message_values.h"
#include "request/wire.h"

namespace {

using gpubridge::fuzz::expect;

// Appends a field of bytes.
void append_field(unsigned number, std::string_view content, std::string& out) {
  out.push_back(static_cast<char>(gpubridge::wire_tag(number, gpubridge::kWireBytes)));
  std::size_t left = content.size();
  for (; left > 0x7FU; left >>= 7U) out.push_back(static_cast<char>((left & 0x7FU) | 0x80U));
  out.push_back(static_cast<char>(left));
  out.append(content);
}

// An input with long typed contents, or with a long parameter: what is given, again and again.
std::string long_input(unsigned number, std::string_view given) {
  constexpr std::size_t kLong = (std::size_t{1} << 16U) + 1;
  std::string content;
  while (content.size() < kLong) content.append(given);
  std::string input;
  append_field(number, content, input);
  std::string form;
  append_field(5, input, form);
  return form;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  const std::uint8_t kind = input.byte();
  std::string form(input.text());
  if (kind % 4 == 1 && !form.empty()) form = long_input(4 + kind / 4 % 2U, form);
  const auto split = gpubridge::split_form(form);
  if (!split) return 0;
  std::size_t taken = 0;
  for (const std::string_view contents : split->contents) {
    expect(contents.empty() || (contents.data() >= form.data() &&
                                contents.data() + contents.size() <= form.data() + form.size()),
           "contents lie in the form");
    taken += contents.size();
  }
  expect(taken <= form.size(), "contents are of different inputs");
  const auto again = gpubridge::split_form(split->skeleton);
  expect(again.has_value() && again->skeleton == split->skeleton, "a skeleton stays as it is");
  expect(again->parameters.empty(), "no parameter is taken twice");
  expect(again->contents.size() == split->contents.size(), "each input stays");
  for (const std::string_view contents : again->contents) expect(contents.empty(), "shortened");
  return 0;
}
