// Typed contents of gRPC requests: two messages behind one another have the values of both.
#include <cstddef>
#include <cstdint>
#include <string>

#include "fuzz.h"
#include "request/message_values.h"

using gpubridge::WireForm;
using gpubridge::fuzz::expect;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  const auto form = static_cast<WireForm>(input.byte() % 3);
  const std::size_t width = std::size_t{1} << (input.byte() % 4U);
  const unsigned field = 1 + input.byte() % 9U;
  const std::size_t item = form == WireForm::kFixed && width < 4 ? 4 : width;
  std::string once;
  if (!gpubridge::pack_typed_contents(input.text(), field, form, item, once)) return 0;
  if (form != WireForm::kBytes) expect(once.size() % item == 0, "elements have their size");
  const std::string doubled = std::string(input.text()) + std::string(input.text());
  std::string twice;
  expect(gpubridge::pack_typed_contents(doubled, field, form, item, twice),
         "repeated, it is valid");
  expect(twice == once + once, "a message twice has its values twice");
  return 0;
}
