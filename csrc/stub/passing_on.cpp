#include "stub/passing_on.h"

namespace gpubridge::stub {

OwnInputs::OwnInputs(const RecordView& record, const Context& context, const LeaseBook& book,
                     std::uint64_t least)
    : least_(least) {
  // Others may still look at the inputs: who gets an output may write to it.
  if (context.has(ContextField::kShared)) return;
  for (std::size_t index = 0; index < record.tensors(); ++index) {
    const TensorRef ref = record.ref(index);
    const bool of_server = ref.region >> 32U == 0;
    if (ref.nbytes < least || !of_server || ref.lease != record.ticket()) continue;
    const char* const begin = book.address(ref);
    inputs_.push_back({begin, begin + ref.nbytes, ref});
  }
  std::ranges::sort(inputs_, {}, &Input::begin);
  for (std::size_t index = 1; index < inputs_.size(); ++index) {
    inputs_[index].end = std::max(inputs_[index].end, inputs_[index - 1].end);
  }
}

std::optional<TensorRef> OwnInputs::find(const char* data, std::size_t size) const {
  if (size < least_) return std::nullopt;
  const auto after = std::ranges::upper_bound(inputs_, data, {}, &Input::begin);
  if (after == inputs_.begin()) return std::nullopt;
  const Input& input = *(after - 1);
  if (data >= input.end || size > static_cast<std::size_t>(input.end - data)) return std::nullopt;
  const auto offset = static_cast<std::uint64_t>(data - input.begin);
  return TensorRef{input.ref.region, input.ref.offset + offset, size, input.ref.lease};
}

}  // namespace gpubridge::stub
