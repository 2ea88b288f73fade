// Records and contexts between server and stub: what is read is written to the same bytes.
#include "ipc/records.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz.h"
#include "ipc/context.h"
#include "rewritten_record.h"

namespace {

using gpubridge::fuzz::expect;

void check_context(std::string_view raw) {
  constexpr std::uint32_t kAll = (std::uint32_t{1} << gpubridge::kContextFields.size()) - 1;
  try {
    const auto context = gpubridge::Context::read(raw, kAll);
    const std::string written = context.encoded();
    const auto again = gpubridge::Context::read(written, kAll);
    expect(again.mask() == context.mask(), "the same fields come as were written");
    if (context.mask() != 0) expect(written == raw, "a context is written as it was read");
  } catch (const gpubridge::MalformedContext&) {
    return;
  }
}

void check_record(std::string_view message, bool named) {
  std::size_t at = 0;
  try {
    while (at < message.size()) {
      const std::size_t start = at;
      const auto record = gpubridge::RecordView::read(message, at, named);
      expect(at > start && at <= message.size(), "a record lies in its message");
      expect(gpubridge::fuzz::rewritten(record) == message.substr(start, at - start),
             "a record is written as it was read");
      check_context(record.context());
      const std::vector<gpubridge::TensorKind> kinds(record.tensors(), {1, 4});
      try {
        record.check(kinds);
      } catch (const gpubridge::MalformedRecord&) {
      }
    }
  } catch (const gpubridge::MalformedRecord&) {
    return;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  const std::uint8_t kind = input.byte();
  if (kind % 3 == 0) {
    check_context(input.text());
  } else {
    check_record(input.text(), kind % 3 == 1);
  }
  return 0;
}
