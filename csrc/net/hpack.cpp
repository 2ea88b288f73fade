#include "net/hpack.h"

#include <atomic>

namespace gpubridge {
namespace {

constexpr std::size_t kFieldOverhead = 32;
constexpr std::size_t kLargestTable = 4096;
constexpr std::uint64_t kLargestNumber = std::uint64_t{1} << 32U;
constexpr std::size_t kKnownBlocks = 8;

template <typename... Texts>
constexpr std::array<std::string_view, sizeof...(Texts)> texts(const Texts&... all) {
  return {all...};
}

// By index, from 1; only the first fields have values.
constexpr auto kStaticNames = texts(
    ":authority", ":method", ":method", ":path", ":path", ":scheme", ":scheme", ":status",
    ":status", ":status", ":status", ":status", ":status", ":status", "accept-charset",
    "accept-encoding", "accept-language", "accept-ranges", "accept", "access-control-allow-origin",
    "age", "allow", "authorization", "cache-control", "content-disposition", "content-encoding",
    "content-language", "content-length", "content-location", "content-range", "content-type",
    "cookie", "date", "etag", "expect", "expires", "from", "host", "if-match", "if-modified-since",
    "if-none-match", "if-range", "if-unmodified-since", "last-modified", "link", "location",
    "max-forwards", "proxy-authenticate", "proxy-authorization", "range", "referer", "refresh",
    "retry-after", "server", "set-cookie", "strict-transport-security", "transfer-encoding",
    "user-agent", "vary", "via", "www-authenticate");
constexpr auto kStaticValues = texts("", "GET", "POST", "/", "/index.html", "http", "https", "200",
                                     "204", "206", "304", "400", "404", "500", "", "gzip, deflate");

constexpr std::size_t kStatic = kStaticNames.size();
static_assert(kStatic == 61);

std::string_view static_value(std::size_t index) {
  return index < kStaticValues.size() ? kStaticValues[index] : std::string_view{};
}

std::size_t entry_size(std::string_view name, std::string_view value) {
  return name.size() + value.size() + kFieldOverhead;
}

void append_number(std::uint64_t number, unsigned prefix_bits, std::uint8_t pattern,
                   std::string& block) {
  const std::uint64_t most = (std::uint64_t{1} << prefix_bits) - 1;
  if (number < most) {
    block.push_back(static_cast<char>(pattern | number));
    return;
  }
  block.push_back(static_cast<char>(pattern | most));
  number -= most;
  for (; number >= 0x80; number >>= 7U) block.push_back(static_cast<char>((number & 0x7FU) | 0x80));
  block.push_back(static_cast<char>(number));
}

void append_string(std::string_view text, std::string& block) {
  append_number(text.size(), 7, 0, block);
  block.append(text);
}

// -- Huffman codes

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

// Appends the text that `coded` stands for; false where it is no sequence of codes with a padding
// of fewer than eight bits, all ones.
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

}  // namespace

void HpackTable::add(Entry entry) {
  const std::size_t size = entry_size(entry->first, entry->second);
  evict(size < limit_ ? limit_ - size : 0);
  if (size > limit_) return;  // it only empties the table
  entries_.push_front(std::move(entry));
  size_ += size;
  ++generation_;
}

bool HpackTable::fits(std::string_view name, std::string_view value) const {
  return size_ + entry_size(name, value) <= limit_;
}

void HpackTable::resize(std::size_t limit) {
  if (limit == limit_) return;
  limit_ = limit;
  ++generation_;
  evict(limit);
}

// Forgets the oldest entries until the others have at most so many bytes.
void HpackTable::evict(std::size_t size) {
  while (size_ > size) {
    size_ -= entry_size(entries_.back()->first, entries_.back()->second);
    entries_.pop_back();
    ++generation_;
  }
}

// Takes a block apart; throws where it ends too early.
class HpackDecoder::Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> block) : block_(block) {}

  [[nodiscard]] bool at_end() const { return block_.empty(); }
  [[nodiscard]] std::uint8_t first() const { return block_.front(); }

  std::uint64_t number(unsigned prefix_bits) {
    const std::uint64_t most = (std::uint64_t{1} << prefix_bits) - 1;
    std::uint64_t number = take() & most;
    if (number < most) return number;
    for (unsigned shift = 0;; shift += 7) {
      const std::uint8_t byte = take();
      if (shift > 28) throw CompressionError("header block: a number is too large");
      number += std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) break;
    }
    if (number > kLargestNumber) throw CompressionError("header block: a number is too large");
    return number;
  }

  // Appends a string; returns its length.
  std::size_t string(std::string& text) {
    if (at_end()) throw CompressionError("header block: it ends within a field");
    const bool huffman = (first() & 0x80U) != 0;
    const std::uint64_t length = number(7);
    if (length > block_.size()) throw CompressionError("header block: it ends within a string");
    const auto coded = block_.first(static_cast<std::size_t>(length));
    block_ = block_.subspan(coded.size());
    const std::size_t before = text.size();
    if (!huffman) {
      text.append(reinterpret_cast<const char*>(coded.data()), coded.size());
    } else if (!huffman_decode(coded, text)) {
      throw CompressionError("header block: a string is no Huffman code");
    }
    return text.size() - before;
  }

 private:
  std::uint8_t take() {
    if (block_.empty()) throw CompressionError("header block: it ends within a number");
    const std::uint8_t byte = block_.front();
    block_ = block_.subspan(1);
    return byte;
  }

  std::span<const std::uint8_t> block_;
};

HeaderList HpackDecoder::decode(std::span<const std::uint8_t> block) {
  HeaderList list;
  Reader reader(block);
  independent_ = true;
  added_.clear();
  while (!reader.at_end()) {
    const std::uint8_t first = reader.first();
    if ((first & 0x80U) != 0) {
      append_indexed(reader.number(7), true, list);
    } else if ((first & 0x40U) != 0) {
      read_literal(reader, reader.number(6), true, list);
    } else if ((first & 0x20U) != 0) {
      if (list.count() != 0) {
        throw CompressionError("header block: the table's size changes behind a field");
      }
      resize(reader.number(5));
    } else {
      read_literal(reader, reader.number(4), false, list);
    }
    if (list.size() > most_) throw HeaderListTooLarge("header list");
  }
  return list;
}

void HpackDecoder::append_indexed(std::uint64_t index, bool with_value, HeaderList& list) {
  std::string_view name;
  std::string_view value;
  if (index == 0 || index > kStatic + table_.entries().size()) {
    throw CompressionError("header block: there is no entry of index " + std::to_string(index));
  }
  if (index <= kStatic) {
    name = kStaticNames[static_cast<std::size_t>(index - 1)];
    value = static_value(static_cast<std::size_t>(index - 1));
  } else {
    const auto& entry = table_.entries()[static_cast<std::size_t>(index - 1) - kStatic];
    name = entry->first;
    value = entry->second;
    independent_ = false;
  }
  if (!with_value) value = {};
  const std::size_t at = list.text_.size();
  list.text_.append(name).append(value);
  list.fields_.push_back({at, name.size(), at + name.size(), value.size()});
}

void HpackDecoder::read_literal(Reader& reader, std::uint64_t index, bool remember_it,
                                HeaderList& list) {
  if (index != 0) {
    append_indexed(index, false, list);
  } else {
    const std::size_t at = list.text_.size();
    const std::size_t size = reader.string(list.text_);
    list.fields_.push_back({at, size, at + size, 0});
  }
  HeaderList::Place& place = list.fields_.back();
  place.value = list.text_.size();
  place.value_size = reader.string(list.text_);
  if (remember_it) {
    const std::size_t last = list.count() - 1;
    added_.push_back(std::make_shared<const HeaderField>(list.name(last), list.value(last)));
    table_.add(added_.back());
  }
}

void HpackDecoder::add(std::span<const HpackTable::Entry> entries) {
  for (const HpackTable::Entry& entry : entries) table_.add(entry);
}

void HpackDecoder::resize(std::uint64_t size) {
  independent_ = false;
  if (size > kLargestTable) {
    throw CompressionError("header block: the table's size is larger than " +
                           std::to_string(kLargestTable));
  }
  table_.resize(static_cast<std::size_t>(size));
}

HeaderFields::HeaderFields(std::vector<HeaderField> fields, bool repeat)
    : fields_(std::move(fields)), repeat_(repeat) {
  static std::atomic<std::uint64_t> made{0};
  id_ = ++made;
  for (const auto& [name, value] : fields_) {
    int status = 0;
    if (name == "grpc-status" &&
        std::from_chars(value.data(), value.data() + value.size(), status).ec == std::errc()) {
      grpc_status_ = status;
    }
  }
}

void HpackEncoder::encode(const HeaderFields& fields, std::string& block) {
  announce_size(block);
  const auto known = std::find_if(known_.begin(), known_.end(), [&fields](const Known& known) {
    return known.id == fields.id();
  });
  if (known != known_.end() && known->generation == table_.generation()) {
    block += known->block;
    return;
  }
  const std::uint64_t generation = table_.generation();
  const std::size_t at = block.size();
  for (const auto& field : fields.fields()) encode_field(field, fields.repeat(), block);
  if (!fields.repeat() || generation != table_.generation()) return;
  Known now{fields.id(), generation, block.substr(at)};
  if (known != known_.end()) {
    *known = std::move(now);
  } else {
    if (known_.size() == kKnownBlocks) known_.erase(known_.begin());
    known_.push_back(std::move(now));
  }
}

void HpackEncoder::limit_table(std::uint64_t smallest, std::uint64_t last) {
  const auto bounded = [](std::uint64_t size) {
    return static_cast<std::size_t>(std::min<std::uint64_t>(size, kLargestTable));
  };
  told_smallest_ = std::min(told_smallest_, bounded(smallest));
  told_last_ = bounded(last);
}

void HpackEncoder::announce_size(std::string& block) {
  if (told_smallest_ >= table_.limit() && told_last_ == table_.limit()) return;
  if (told_smallest_ < told_last_) append_number(told_smallest_, 5, 0x20, block);
  append_number(told_last_, 5, 0x20, block);
  table_.resize(told_smallest_);
  table_.resize(told_last_);
  told_smallest_ = told_last_;
}

void HpackEncoder::encode_field(const HeaderField& field, bool repeat, std::string& block) {
  std::size_t name_index = 0;
  const auto look = [&](std::size_t index, std::string_view name, std::string_view value) {
    if (name != field.first) return false;
    if (name_index == 0) name_index = index;
    if (value != field.second) return false;
    append_number(index, 7, 0x80, block);
    return true;
  };
  for (std::size_t index = 0; index < kStatic; ++index) {
    if (look(index + 1, kStaticNames[index], static_value(index))) return;
  }
  for (std::size_t index = 0; index < table_.entries().size(); ++index) {
    const auto& [name, value] = *table_.entries()[index];
    if (look(kStatic + index + 1, name, value)) return;
  }
  // Only what fits beside the others: entries that drive each other out would not pay.
  const bool remember = repeat && table_.fits(field.first, field.second);
  append_number(name_index, remember ? 6 : 4, remember ? 0x40 : 0, block);
  if (name_index == 0) append_string(field.first, block);
  append_string(field.second, block);
  if (remember) table_.add(std::make_shared<const HeaderField>(field));
}

}  // namespace gpubridge
