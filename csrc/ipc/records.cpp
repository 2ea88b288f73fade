#include "ipc/records.h"

#include "little_endian.h"

namespace gpubridge {
namespace {

constexpr std::size_t kWord = sizeof(std::uint32_t);
constexpr std::size_t kHead = 6 * kWord;
constexpr std::size_t kDim = sizeof(std::int64_t);
constexpr std::size_t kRef = TensorRef::kSize;
constexpr std::size_t kMaxTensors = 4096;
constexpr auto kMostBytes = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

std::string_view take(std::string_view message, std::size_t& at, std::size_t count) {
  return take_bytes<MalformedRecord>(message, at, count, "it ends in the middle of a record");
}

// Checks that a tensor can have a shape: without elements it has no bytes, whatever its other dims
// are.
bool fits(const RecordView& record, std::size_t first, const TensorKind& kind) {
  bool empty = false;
  for (std::size_t index = first; index < first + kind.rank; ++index) {
    if (record.dim(index) < 0) return false;
    empty = empty || record.dim(index) == 0;
  }
  if (empty) return true;
  std::uint64_t nbytes = kind.itemsize == 0 ? 1 : kind.itemsize;
  for (std::size_t index = first; index < first + kind.rank; ++index) {
    const auto dim = static_cast<std::uint64_t>(record.dim(index));
    if (dim > kMostBytes / nbytes) return false;
    nbytes *= dim;
  }
  return true;
}

}  // namespace

RecordView RecordView::read(std::string_view message, std::size_t& at, bool named) {
  const std::string_view head = take(message, at, kHead);
  std::array<std::uint32_t, 6> words{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = get_number<std::uint32_t>(head.data() + kWord * i);
  }
  const auto [ticket, signed_size, context_size, word, tensors, dims] = words;
  if (tensors > kMaxTensors) {
    throw MalformedRecord("a record of " + std::to_string(tensors) + " tensors came (limit " +
                          std::to_string(kMaxTensors) + ")");
  }
  RecordView record;
  record.ticket_ = ticket;
  record.word_ = word;
  record.tensors_ = tensors;
  record.signature_ = take(message, at, signed_size);
  record.context_ = take(message, at, context_size);
  if (named) record.identifier_ = take(message, at, word);
  record.dims_ = take(message, at, kDim * dims);
  record.refs_ = take(message, at, kRef * tensors);
  return record;
}

std::size_t RecordView::size() const {
  return kHead + signature_.size() + context_.size() + identifier_.size() + dims_.size() +
         refs_.size();
}

void RecordView::check(std::span<const TensorKind> kinds) const {
  if (kinds.size() != tensors_) {
    throw MalformedRecord("a record of " + std::to_string(tensors_) +
                          " tensors came with a signature of " + std::to_string(kinds.size()));
  }
  std::uint64_t dims = 0;
  for (const TensorKind& kind : kinds) dims += kind.rank;
  if (dims != dims_.size() / kDim) {
    throw MalformedRecord("a record of " + std::to_string(dims_.size() / kDim) +
                          " dims came with a signature of " + std::to_string(dims));
  }
  std::size_t first = 0;
  for (const TensorKind& kind : kinds) {
    if (!fits(*this, first, kind)) {
      throw MalformedRecord("a tensor has a negative dim, or more bytes than 63 bits count");
    }
    first += kind.rank;
  }
}

bool RecordView::sizes_fit(std::span<const TensorKind> kinds) const {
  std::size_t dim = 0;
  for (std::size_t index = 0; index < kinds.size(); ++index) {
    std::uint64_t nbytes = kinds[index].itemsize;
    for (const std::size_t end = dim + kinds[index].rank; dim < end; ++dim) {
      nbytes *= static_cast<std::uint64_t>(this->dim(dim));
    }
    if (kinds[index].itemsize != 0 && nbytes != ref(index).nbytes) return false;
  }
  return true;
}

std::size_t RecordParts::size() const {
  return kHead + signature.size() + context.size() + identifier.size() + dims.size() +
         kRef * tensors;
}

char* RecordParts::write(char* at) const {
  at = put_number(at, ticket);
  at = put_number(at, static_cast<std::uint32_t>(signature.size()));
  at = put_number(at, static_cast<std::uint32_t>(context.size()));
  at = put_number(at, identifier.empty() ? word : static_cast<std::uint32_t>(identifier.size()));
  at = put_number(at, tensors);
  at = put_number(at, static_cast<std::uint32_t>(dims.size() / kDim));
  return put_bytes(put_bytes(put_bytes(put_bytes(at, signature), context), identifier), dims);
}

}  // namespace gpubridge
