// Messages between server and stub, as either reads them: a record lies in its message, is what was
// written, and has the sizes that its signature says.
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz.h"
#include "ipc/context.h"
#include "ipc/messages.h"
#include "rewritten_record.h"

namespace {

using namespace gpubridge;
using fuzz::expect;

using Kinds = std::vector<TensorKind>;

// Bytes of a tensor with the next dims of a record; none where that is not a size.
std::optional<std::uint64_t> nbytes_of(const RecordView& record, std::size_t first,
                                       const TensorKind& kind) {
  constexpr auto kMost = static_cast<__uint128_t>(std::numeric_limits<std::int64_t>::max());
  __uint128_t nbytes = kind.itemsize == 0 ? 1 : kind.itemsize;
  bool empty = false;
  bool fits = true;
  for (std::size_t index = first; index < first + kind.rank; ++index) {
    if (record.dim(index) < 0) return std::nullopt;
    empty = empty || record.dim(index) == 0;
    if (fits) nbytes *= static_cast<__uint128_t>(record.dim(index));
    fits = fits && nbytes <= kMost;
  }
  if (empty) return 0;
  return fits ? std::optional(static_cast<std::uint64_t>(nbytes)) : std::nullopt;
}

bool is_checked(const RecordView& record, const Kinds& kinds) {
  try {
    record.check(kinds);
    return true;
  } catch (const MalformedRecord&) {
    return false;
  }
}

void check_sizes(const RecordView& record, const Kinds& kinds) {
  if (!is_checked(record, kinds)) return;
  bool fit = true;
  std::size_t dim = 0;
  for (std::size_t index = 0; index < kinds.size(); ++index) {
    const auto nbytes = nbytes_of(record, dim, kinds[index]);
    expect(nbytes.has_value(), "checked dims make a size");
    fit = fit && (kinds[index].itemsize == 0 || *nbytes == record.ref(index).nbytes);
    dim += kinds[index].rank;
  }
  expect(dim * sizeof(std::int64_t) == record.dims().size(), "each dim is a tensor's");
  expect(record.sizes_fit(kinds) == fit, "references have the bytes that dims say");
}

void check_context(std::string_view raw) {
  constexpr std::uint32_t kAll = (std::uint32_t{1} << kContextFields.size()) - 1;
  try {
    Context::read(raw, kAll);
  } catch (const MalformedContext&) {
    return;
  }
}

// The records are those of the message behind `at`; returns where they end.
std::size_t check_records(std::string_view message, std::size_t at,
                          const std::vector<RecordView>& records, const Kinds& kinds) {
  for (const RecordView& record : records) {
    expect(record.size() <= message.size() - at, "a record lies in its message");
    expect(fuzz::rewritten(record) == message.substr(at, record.size()),
           "it is written as it was read");
    check_sizes(record, kinds);
    check_context(record.context());
    at += record.size();
  }
  return at;
}

void check_execute(std::string_view message, const Kinds& kinds) {
  ExecuteFrame frame;
  std::size_t end = 0;
  const auto batches = decode_execute(message);
  for (const ExecuteBatch& batch : batches) {
    expect(batch.first > end && batch.first <= message.size(), "a batch follows another");
    end = check_records(message, batch.first, batch.records, kinds);
    const auto records = message.substr(batch.first, end - batch.first);
    frame.add(batch.sequence, batch.records.size(), records);
  }
  const std::string again = frame.take(false);
  const auto repeated = decode_execute(again);
  expect(repeated.size() == batches.size(), "as many batches are read as were written");
  for (std::size_t index = 0; index < batches.size(); ++index) {
    expect(repeated[index].sequence == batches[index].sequence, "a batch has its number");
    expect(repeated[index].first == batches[index].first, "a batch has its place");
  }
}

void check_message(std::uint8_t kind, std::string_view message, const Kinds& kinds) {
  constexpr std::size_t kHead = 8;
  switch (kind % 5) {
    case 0: {
      const CallsMessage calls = decode_calls(message);
      const std::size_t first = kHead * (1 + calls.batches.size());
      expect(check_records(message, first, calls.records, kinds) == message.size(),
             "nothing comes after the last call");
      break;
    }
    case 1:
      expect(check_records(message, kHead, decode_call_responses(message), kinds) == message.size(),
             "nothing comes after the last response");
      break;
    case 2:
      check_execute(message, kinds);
      break;
    case 3:
      check_records(message, 2 * kHead, decode_responses(message).records, kinds);
      break;
    default:
      std::size_t at = kHead;
      for (const ResultBatch& batch : decode_results(message)) {
        at = check_records(message, at + 6 * kHead, batch.records, kinds);
      }
      expect(at == message.size(), "nothing comes after the last result");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::array<std::uint32_t, 5> kSizes{0, 1, 2, 4, 8};
  fuzz::Input input(data, size);
  const std::uint8_t kind = input.byte();
  Kinds kinds(input.byte() % 4);
  for (TensorKind& each : kinds) {
    const std::uint8_t said = input.byte();
    each = {said % 4U, kSizes[said / 4 % kSizes.size()]};
  }
  try {
    check_message(kind, input.text(), kinds);
  } catch (const MalformedRecord&) {
    return 0;
  }
  return 0;
}
