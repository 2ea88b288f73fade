#include "request/keyed_hash.h"

#include <random>

namespace gpubridge {
namespace {

using Key = std::array<std::uint64_t, 2>;

std::uint64_t random_word(std::random_device& source) {
  return std::uint64_t{source()} << 32U | std::uint64_t{source()};
}

const Key& process_key() {
  static const Key key = [] {
    std::random_device source;
    return Key{random_word(source), random_word(source)};
  }();
  return key;
}

class SipState {
 public:
  explicit SipState(const Key& key)
      : v0_(key[0] ^ 0x736f6d6570736575U),
        v1_(key[1] ^ 0x646f72616e646f6dU),
        v2_(key[0] ^ 0x6c7967656e657261U),
        v3_(key[1] ^ 0x7465646279746573U) {}

  void take(std::uint64_t word) {
    v3_ ^= word;
    round();
    v0_ ^= word;
  }

  std::uint64_t finish() {
    v2_ ^= 0xFFU;
    for (int i = 0; i < 3; ++i) round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

 private:
  void round() {
    v0_ += v1_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v3_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ += v3_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ += v1_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v2_ = std::rotl(v2_, 32);
  }

  std::uint64_t v0_;
  std::uint64_t v1_;
  std::uint64_t v2_;
  std::uint64_t v3_;
};

}  // namespace

std::uint64_t keyed_hash(std::string_view text) {
  SipState state(process_key());
  std::size_t at = 0;
  for (; text.size() - at >= sizeof(std::uint64_t); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, sizeof word);
    state.take(word);
  }
  std::uint64_t last = std::uint64_t{text.size() & 0xFFU} << 56U;
  for (unsigned shift = 0; at < text.size(); ++at, shift += 8) {
    last |= std::uint64_t{static_cast<unsigned char>(text[at])} << shift;
  }
  state.take(last);
  return state.finish();
}

}  // namespace gpubridge
