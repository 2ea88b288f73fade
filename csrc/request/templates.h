// Templates of requests: what all requests with the same key have in common, found by the key.
//
// Python parses the first request with a key and says what its inputs have to be. Each later one is
// checked here against that; a request that fails any check is "not mine", and Python parses its
// bytes anew and words the error.
#pragma once

#include <list>

#include "request/json_values.h"
#include "request/scan.h"
#include "std.h"

namespace gpubridge {

// Requirements on one input of a template.
struct InputRule {
  std::vector<std::int64_t> dims;     // As clients see it, batch dim included; -1 for any.
  std::vector<std::int64_t> reshape;  // After the batch dim, at the model, if `reshaped`.
  bool reshaped = false;
  std::uint32_t item_size = 0;      // 0 for BYTES.
  std::optional<ElementType> json;  // Of its elements, if they are JSON values in the request.
  bool in_region = false;           // In memory that the client registered.
  std::uint64_t region_bytes = 0;   // Its size there, where no value of the request says it.
};

struct TemplateRules {
  std::uint64_t max_batch_size = 0;  // 0 where the model does not batch.
  std::uint64_t alignment = 1;       // Of the places of inputs.
  std::vector<InputRule> inputs;
};

// Where an input that came with the request lies, from the first input on; `strings` is its number
// of elements if it is a BYTES input.
struct InputPlace {
  std::uint64_t at = 0;
  std::uint64_t nbytes = 0;
  std::uint64_t strings = 0;
  std::uint32_t item_size = 0;
};

// The values of an input that came as JSON: an array, or the only value.
struct JsonInput {
  std::size_t place = 0;  // Its index among the places.
  std::string_view values;
  ElementType type{};
  std::uint64_t count = 0;
};

// A request that has a template.
struct MatchedRequest {
  std::shared_ptr<void> owner;  // As given to `add`.
  std::uint64_t batch_size = 1;
  std::uint64_t nbytes = 0;           // Of all inputs that came with it, gaps not counted.
  std::uint64_t end = 0;              // Where the last of them ends.
  std::vector<std::int64_t> dims;     // Of all inputs, one after another, as the model sees them.
  std::vector<InputPlace> places;     // Of those inputs that came with it.
  std::vector<std::uint64_t> owners;  // The input of each place.
  // Those places whose bytes have still to be made; one of strings has no size yet.
  std::vector<JsonInput> json;
};

// Templates of one model or, where the key has the model's name, of several; least recently used
// ones go first when they take more than `limit` bytes.
class RequestTemplates {
 public:
  explicit RequestTemplates(std::size_t limit) : limit_(limit) {}

  // Adds a template, which holds `owner`; false if its values cannot be checked.
  bool add(const RequestScan& scan, TemplateRules rules, std::shared_ptr<void> owner);

  // Forgets the templates whose owners `is_gone` accepts.
  void remove_if(const std::function<bool(const std::shared_ptr<void>&)>& is_gone);

  // Shows the owners of all templates.
  void visit(const std::function<void(const std::shared_ptr<void>&)>& see) const {
    for (const Entry& entry : entries_) see(entry.owner);
  }

  // Finds the template of a request and checks it; false where there is none or a check fails.
  [[nodiscard]] bool match(const RequestScan& scan, MatchedRequest& matched);

  [[nodiscard]] std::size_t size() const { return by_key_.size(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  struct Entry {
    std::string key;
    TemplateRules rules;
    std::shared_ptr<void> owner;
    std::size_t bytes = 0;
  };
  using Entries = std::list<Entry>;

  void drop(Entries::iterator entry);

  std::size_t limit_;
  std::size_t bytes_ = 0;
  Entries entries_;  // The most recently used one first.
  // Ordered: clients cannot choose keys that collide.
  std::map<std::string_view, Entries::iterator> by_key_;
};

// Makes each input begin at a multiple of its item size, counted from the beginning of `memory`,
// where the first place is at `start`: inputs are moved up, and their places changed. Returns how
// many bytes were moved; nullopt, with all as it was, if the memory is too small.
[[nodiscard]] std::optional<std::uint64_t> align_inputs(std::span<unsigned char> memory,
                                                        std::uint64_t start,
                                                        std::vector<InputPlace>& places);

// True if the bytes are exactly `count` strings, each after its length of four bytes.
bool holds_strings(std::span<const unsigned char> bytes, std::uint64_t count);

}  // namespace gpubridge
