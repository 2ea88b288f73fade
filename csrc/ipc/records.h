// The records of requests and responses inside messages: how they lie in them, both ways. The
// layout is described in gpubridge/transport/records.py, which has the same in Python.
#pragma once

#include "little_endian.h"
#include "std.h"

namespace gpubridge {

// A record that no peer sends; the text says what is wrong with it.
class MalformedRecord : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// That of tensors without bytes.
inline constexpr std::uint32_t kNoLease = 0xFFFFFFFFU;

// Where a tensor's bytes lie, and under which lease they are lent.
struct TensorRef {
  static constexpr std::size_t kSize = 28;  // encoded

  std::uint64_t region = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::uint32_t lease = 0;
};

// Rank and element size of a tensor in a signature; itemsize is 0 for BYTES.
struct TensorKind {
  std::uint32_t rank = 0;
  std::uint32_t itemsize = 0;
};

// A record as it lies in a message, which must outlive this view of it. `word` is the size of the
// identifier in a request, and the flags of a response.
class RecordView {
 public:
  // Reads the record at `at` and moves that to its end; throws MalformedRecord where the message
  // ends before the record does, or it has too many tensors. Requests are `named`.
  static RecordView read(std::string_view message, std::size_t& at, bool named);

  // Bytes of the whole record.
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] std::uint32_t ticket() const { return ticket_; }
  [[nodiscard]] std::uint32_t word() const { return word_; }
  [[nodiscard]] std::string_view signature() const { return signature_; }
  [[nodiscard]] std::string_view context() const { return context_; }
  [[nodiscard]] std::string_view identifier() const { return identifier_; }
  // The dims of all tensors, one after another, as bytes; two records with the same ones and the
  // same signature have the same shapes.
  [[nodiscard]] std::string_view dims() const { return dims_; }
  [[nodiscard]] std::int64_t dim(std::size_t index) const {
    return get_number<std::int64_t>(dims_.data() + sizeof(std::int64_t) * index);
  }
  [[nodiscard]] std::size_t tensors() const { return tensors_; }
  [[nodiscard]] TensorRef ref(std::size_t index) const {
    const char* at = refs_.data() + TensorRef::kSize * index;
    return {get_number<std::uint64_t>(at), get_number<std::uint64_t>(at + 8),
            get_number<std::uint64_t>(at + 16), get_number<std::uint32_t>(at + 24)};
  }

  // Throws MalformedRecord unless the dims are those of such tensors: as many as the ranks say,
  // none of them negative, and no tensor of more bytes than 63 bits count.
  void check(std::span<const TensorKind> kinds) const;
  // True if the references have as many bytes as checked tensors of such kinds need.
  [[nodiscard]] bool sizes_fit(std::span<const TensorKind> kinds) const;

 private:
  std::uint32_t ticket_ = 0;
  std::uint32_t word_ = 0;
  std::size_t tensors_ = 0;
  std::string_view signature_;
  std::string_view context_;
  std::string_view identifier_;
  std::string_view dims_;
  std::string_view refs_;
};

// The parts of a record to be written; `dims` are encoded. A request's word is the size of its
// identifier, whatever `word` is.
struct RecordParts {
  std::uint32_t ticket = 0;
  std::uint32_t word = 0;
  std::uint32_t tensors = 0;
  std::string_view signature;
  std::string_view context;
  std::string_view identifier;
  std::string_view dims;

  // Bytes of the whole record.
  [[nodiscard]] std::size_t size() const;
  // Write all but the references, the latter at the end of a text; return where they go.
  char* write(char* at) const;
  char* append_to(std::string& text) const {
    const std::size_t at = text.size();
    text.resize(at + size());
    return write(text.data() + at);
  }
};

// Writes a reference; returns its end.
inline char* write_ref(char* at, const TensorRef& ref) {
  at = put_number(put_number(put_number(at, ref.region), ref.offset), ref.nbytes);
  return put_number(at, ref.lease);
}

}  // namespace gpubridge
