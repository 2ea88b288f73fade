// Header compression: what is decoded is encoded and decoded again to the same fields, with one
// table on each side for all blocks.
#include "net/hpack.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fuzz.h"

namespace {

using gpubridge::fuzz::expect;

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  constexpr std::size_t kMost = 4096;
  gpubridge::HpackDecoder decoder(kMost);
  gpubridge::HpackEncoder encoder;
  gpubridge::HpackDecoder peer(kMost);
  // Blocks, each after its length.
  while (!input.rest().empty()) {
    const std::size_t length = std::min<std::size_t>(input.byte(), input.rest().size());
    std::vector<std::uint8_t> block;
    for (std::size_t index = 0; index < length; ++index) block.push_back(input.byte());
    gpubridge::HeaderList list;
    try {
      list = decoder.decode(block);
    } catch (const gpubridge::CompressionError&) {
      return 0;
    } catch (const gpubridge::HeaderListTooLarge&) {
      continue;
    }
    expect(list.size() <= kMost, "a list has the size that it may have");
    std::vector<std::pair<std::string, std::string>> fields;
    for (std::size_t index = 0; index < list.count(); ++index) {
      fields.emplace_back(list.name(index), list.value(index));
    }
    const gpubridge::HeaderFields sent(fields, length % 2 == 0);
    for (int time = 0; time < 2; ++time) {
      std::string coded;
      encoder.encode(sent, coded);
      const gpubridge::HeaderList again = peer.decode(bytes_of(coded));
      expect(again.count() == fields.size(), "as many fields come as were sent");
      for (std::size_t index = 0; index < fields.size(); ++index) {
        expect(again.name(index) == fields[index].first, "a name comes as it was sent");
        expect(again.value(index) == fields[index].second, "a value comes as it was sent");
      }
    }
  }
  return 0;
}
