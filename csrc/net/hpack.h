// Header compression (RFC 7541): the header blocks of a connection, one way each.
#pragma once

#include "std.h"

namespace gpubridge {

// Name and value.
using HeaderField = std::pair<std::string, std::string>;

// The fields of one header block, in their order, in one piece of memory.
class HeaderList {
 public:
  [[nodiscard]] std::size_t count() const { return fields_.size(); }
  [[nodiscard]] std::string_view name(std::size_t index) const {
    return std::string_view(text_).substr(fields_[index].name, fields_[index].name_size);
  }
  [[nodiscard]] std::string_view value(std::size_t index) const {
    return std::string_view(text_).substr(fields_[index].value, fields_[index].value_size);
  }
  // Names, values and 32 bytes a field (RFC 9113, section 6.5.2).
  [[nodiscard]] std::size_t size() const { return text_.size() + fields_.size() * 32; }
  // Bytes of memory.
  [[nodiscard]] std::size_t memory() const {
    return text_.capacity() + fields_.capacity() * sizeof(Place);
  }

 private:
  friend class HpackDecoder;
  struct Place {
    std::size_t name;
    std::size_t name_size;
    std::size_t value;
    std::size_t value_size;
  };
  std::string text_;
  std::vector<Place> fields_;
};

// The block cannot be decoded; the state of the table is lost.
class CompressionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The list is larger than any that is decoded.
class HeaderListTooLarge : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The dynamic table: fields of earlier blocks that both ends remember (RFC 7541, section 2.3.2).
class HpackTable {
 public:
  using Entry = std::shared_ptr<const HeaderField>;
  // Bytes of memory of an entry, at most.
  static std::size_t memory(const Entry& entry) {
    return 2 * sizeof(HeaderField) + entry->first.capacity() + entry->second.capacity();
  }

  // The newest first.
  [[nodiscard]] const std::deque<Entry>& entries() const { return entries_; }
  [[nodiscard]] std::size_t limit() const { return limit_; }
  // Grows when the table changes: until then a block keeps its meaning.
  [[nodiscard]] std::uint64_t generation() const { return generation_; }

  // Adds an entry, which evicts the oldest ones until it fits.
  void add(Entry entry);
  [[nodiscard]] bool fits(std::string_view name, std::string_view value) const;
  void resize(std::size_t limit);

 private:
  void evict(std::size_t size);

  std::deque<Entry> entries_;
  std::size_t size_ = 0;
  std::size_t limit_ = 4096;
  std::uint64_t generation_ = 0;
};

class HpackDecoder {
 public:
  // `most` is the size of the largest header list.
  explicit HpackDecoder(std::size_t most) : most_(most) {}

  // Decodes a whole block. Throws CompressionError and HeaderListTooLarge.
  HeaderList decode(std::span<const std::uint8_t> block);

  // Of the table.
  [[nodiscard]] std::uint64_t generation() const { return table_.generation(); }
  // True if the last block means the same whatever the table holds, and the entries it added.
  [[nodiscard]] bool independent() const { return independent_; }
  [[nodiscard]] const std::vector<HpackTable::Entry>& added() const { return added_; }
  // Adds entries as a block does that adds them.
  void add(std::span<const HpackTable::Entry> entries);

 private:
  class Reader;

  void append_indexed(std::uint64_t index, bool with_value, HeaderList& list);
  void read_literal(Reader& reader, std::uint64_t index, bool remember, HeaderList& list);
  void resize(std::uint64_t size);

  std::size_t most_;
  HpackTable table_;
  bool independent_ = false;
  std::vector<HpackTable::Entry> added_;
};

// Fields to be sent, which are not checked: names in lower case, pseudo-header fields first.
class HeaderFields {
 public:
  // Those that repeat enter the peer's table at the first time, and cost a byte each afterwards.
  HeaderFields(std::vector<HeaderField> fields, bool repeat);

  [[nodiscard]] const std::vector<HeaderField>& fields() const { return fields_; }
  [[nodiscard]] bool repeat() const { return repeat_; }
  // The value of grpc-status; none where that is not among them.
  [[nodiscard]] std::optional<int> grpc_status() const { return grpc_status_; }
  // Differs between any two objects.
  [[nodiscard]] std::uint64_t id() const { return id_; }

 private:
  std::vector<HeaderField> fields_;
  std::optional<int> grpc_status_;
  bool repeat_;
  std::uint64_t id_;
};

class HpackEncoder {
 public:
  // Appends the block; blocks have to be sent in the order in which they are encoded.
  void encode(const HeaderFields& fields, std::string& block);

  // The peer has changed the size that the table may have: at least once to `smallest`, now `last`.
  void limit_table(std::uint64_t smallest, std::uint64_t last);

 private:
  struct Known {
    std::uint64_t id;
    std::uint64_t generation;
    std::string block;
  };

  void announce_size(std::string& block);
  void encode_field(const HeaderField& field, bool repeat, std::string& block);

  HpackTable table_;
  // Size to announce before the next block; equal to the limit if none has to be announced.
  std::size_t told_smallest_ = 4096;
  std::size_t told_last_ = 4096;
  std::vector<Known> known_;
};

}  // namespace gpubridge
