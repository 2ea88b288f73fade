// Header blocks of requests, many of which come again: they mean what they mean to a decoder that
// remembers none of them.
#include "net/header_blocks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fuzz.h"

namespace {

using namespace gpubridge::http2;
using gpubridge::fuzz::expect;

// The fields of a list, as one text.
std::string text_of(const gpubridge::HeaderList& list) {
  std::string text;
  for (std::size_t index = 0; index < list.count(); ++index) {
    for (const std::string_view part : {list.name(index), list.value(index)}) {
      text += std::to_string(part.size()) + ":";
      text.append(part);
    }
  }
  return text;
}

// What becomes of a block that opens a stream.
std::string opened(State& state, HeaderBlocks& blocks, std::uint32_t id,
                   std::span<const std::uint8_t> block) {
  try {
    blocks.begin({.length = block.size(), .type = kHeaders, .flags = kEndHeaders, .stream = id},
                 block);
  } catch (const StreamFault&) {
    return "stream fault";
  } catch (const ConnectionFault&) {
    return "connection fault";
  }
  const Stream* stream = state.find(id);
  expect(stream != nullptr, "a request has a stream");
  std::string text = text_of(stream->reader.headers()->fields());
  state.streams.clear();
  state.events.clear();
  state.untold.clear();
  return text;
}

std::string decoded(const State& state, gpubridge::HpackDecoder& decoder,
                    std::span<const std::uint8_t> block) {
  try {
    gpubridge::HeaderList list = decoder.decode(block);
    const bool large = list.size() > static_cast<std::size_t>(state.limits().header_list_bytes);
    const auto headers = gpubridge::RequestHeaders::read(std::move(list), state.methods());
    return large || headers == nullptr ? "stream fault" : text_of(headers->fields());
  } catch (const gpubridge::CompressionError&) {
    return "connection fault";
  } catch (const gpubridge::HeaderListTooLarge&) {
    return "connection fault";
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  Limits limits;
  limits.header_list_bytes = 512;
  State state(limits, std::make_shared<gpubridge::GrpcMethods>());
  HeaderBlocks blocks(state);
  gpubridge::HpackDecoder decoder(static_cast<std::size_t>(limits.header_list_bytes * 4));
  // Blocks after their lengths; a length above 200 says which one comes again.
  std::vector<std::vector<std::uint8_t>> seen;
  for (std::uint32_t id = 1; !input.rest().empty() && id < 400; id += 2) {
    const std::size_t length = input.byte();
    if (length <= 200 || seen.empty()) {
      const auto block = input.rest().first(std::min(length, input.rest().size()));
      seen.emplace_back(block.begin(), block.end());
      for (std::size_t count = block.size(); count > 0; --count) input.byte();
    } else {
      seen.push_back(seen[length % seen.size()]);
    }
    const std::string found = opened(state, blocks, id, seen.back());
    expect(found == decoded(state, decoder, seen.back()), "a block means what it says");
    if (found == "connection fault") return 0;
  }
  return 0;
}
