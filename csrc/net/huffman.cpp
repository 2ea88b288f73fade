#include "net/hpack.h"

namespace gpubridge {
namespace {

constexpr std::size_t kSymbols = 257;
constexpr std::size_t kEndOfString = 256;
constexpr std::size_t kNodes = 256;  // inner nodes of the tree
constexpr unsigned kLongestCode = 30;
constexpr unsigned kLongestPadding = 7;

// The lengths of the codes, by symbol. Codes of one length are numbers one after another in the
// order of their symbols, behind those of shorter codes.
constexpr std::array<std::uint8_t, kSymbols> kLengths = {
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28,
    28, 28, 28, 28, 28, 28, 28, 28, 6,  10, 10, 12, 13, 6,  8,  11, 10, 10, 8,  11, 8,  6,  6,  6,
    5,  5,  5,  6,  6,  6,  6,  6,  6,  6,  7,  8,  15, 6,  12, 10, 13, 6,  7,  7,  7,  7,  7,  7,
    7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  8,  7,  8,  13, 19, 13, 14, 6,
    15, 5,  6,  5,  6,  5,  6,  6,  6,  5,  7,  7,  6,  6,  6,  5,  6,  7,  6,  5,  5,  6,  7,  7,
    7,  7,  7,  15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21,
    23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24,
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30};

// The end of four more bits from an inner node of the tree. No code is so short that four bits
// could end two of them.
struct Step {
  std::uint8_t next = 0;
  std::uint8_t symbol = 0;
  bool emits = false;
  bool fails = false;
};

class Automaton {
 public:
  Automaton() {
    Tree tree{};
    std::size_t nodes = 1;
    std::uint32_t code = 0;
    for (unsigned length = 1; length <= kLongestCode; ++length, code <<= 1U) {
      for (std::size_t symbol = 0; symbol < kSymbols; ++symbol) {
        if (kLengths[symbol] == length) insert(tree, nodes, code++, length, symbol);
      }
    }
    for (std::size_t node = 0; node < kNodes; ++node) {
      for (std::size_t nibble = 0; nibble < 16; ++nibble) {
        steps_[node][nibble] = walk(tree, node, nibble);
      }
    }
    std::size_t node = 0;
    for (unsigned bits = 0; bits <= kLongestPadding; ++bits) {
      may_end_[node] = true;
      node = static_cast<std::size_t>(tree[node][1]);
    }
  }

  [[nodiscard]] Step step(std::size_t node, std::size_t nibble) const {
    return steps_[node][nibble];
  }
  // A text may end at the root, and within a padding of ones.
  [[nodiscard]] bool may_end(std::size_t node) const { return may_end_[node]; }

 private:
  // Children by bit: an inner node's index, or a symbol beyond them.
  using Tree = std::array<std::array<std::uint16_t, 2>, kNodes>;

  static void insert(Tree& tree, std::size_t& nodes, std::uint32_t code, unsigned length,
                     std::size_t symbol) {
    std::size_t node = 0;
    for (unsigned left = length; left > 1; --left) {
      std::uint16_t& child = tree[node][code >> (left - 1U) & 1U];
      if (child == 0) child = static_cast<std::uint16_t>(nodes++);
      node = child;
    }
    tree[node][code & 1U] = static_cast<std::uint16_t>(kNodes + symbol);
  }

  static Step walk(const Tree& tree, std::size_t node, std::size_t nibble) {
    Step step;
    for (unsigned left = 4; left > 0; --left) {
      node = tree[node][nibble >> (left - 1U) & 1U];
      if (node < kNodes) continue;
      if (node == kNodes + kEndOfString) {
        step.fails = true;
        return step;
      }
      step.symbol = static_cast<std::uint8_t>(node - kNodes);
      step.emits = true;
      node = 0;
    }
    step.next = static_cast<std::uint8_t>(node);
    return step;
  }

  std::array<std::array<Step, 16>, kNodes> steps_{};
  std::array<bool, kNodes> may_end_{};
};

}  // namespace

bool huffman_decode(std::span<const std::uint8_t> coded, std::string& text) {
  static const Automaton automaton;
  std::size_t node = 0;
  for (const std::uint8_t byte : coded) {
    for (const unsigned nibble : {unsigned{byte} >> 4U, unsigned{byte} & 15U}) {
      const Step step = automaton.step(node, nibble);
      if (step.fails) return false;
      if (step.emits) text.push_back(static_cast<char>(step.symbol));
      node = step.next;
    }
  }
  return automaton.may_end(node);
}

}  // namespace gpubridge
