#include "request/json_cursor.h"
#include "request/json_values.h"
#include "request/scan.h"
#include "text.h"

namespace gpubridge {
namespace {

constexpr int kDeepest = 16;
constexpr std::size_t kMostMembers = 64;
constexpr std::size_t kUsualNames = 16;
// The places of more values are not kept for the next header; 500 tensors have about 2,000.
constexpr std::size_t kMostPlaces = 4096;

struct Member;

// Roles of a value by its path in a request: as a number, as a text, and of its members.
struct Node {
  Role number = Role::kNone;
  Role text = Role::kNone;
  Role array = Role::kNone;         // as a whole, whatever is in it
  const Node* element = nullptr;    // of each element, if it is an array
  const Member* members = nullptr;  // if it is an object
  std::size_t count = 0;
  const Node* others = nullptr;  // members of other names
};

struct Member {
  std::string_view name;
  Node node;
};

template <std::size_t Count>
constexpr Node object_of(const std::array<Member, Count>& members, const Node* others = nullptr) {
  return {.members = members.data(), .count = Count, .others = others};
}

constexpr Node kNothing{};
constexpr Node kDim{.number = Role::kDim};
constexpr Node kCustom{.number = Role::kCustomNumber, .text = Role::kCustomText};

constexpr std::array kInputParameters{
    Member{"binary_data_size", {.number = Role::kBinarySize}},
    Member{"shared_memory_region", {.text = Role::kInputRegion}},
    Member{"shared_memory_offset", {.number = Role::kInputOffset}},
    Member{"shared_memory_byte_size", {.number = Role::kInputBytes}},
};
constexpr std::array kInputMembers{
    Member{"shape", {.element = &kDim}},
    Member{"parameters", object_of(kInputParameters)},
    Member{"data", {.array = Role::kValues}},
};
constexpr Node kInput = object_of(kInputMembers);

constexpr std::array kOutputParameters{
    Member{"shared_memory_region", {.text = Role::kOutputRegion}},
    Member{"shared_memory_offset", {.number = Role::kOutputOffset}},
    Member{"shared_memory_byte_size", {.number = Role::kOutputBytes}},
};
constexpr std::array kOutputMembers{Member{"parameters", object_of(kOutputParameters)}};
constexpr Node kOutput = object_of(kOutputMembers);

constexpr std::array kParameters{
    Member{"priority", {.number = Role::kPriority}},
    Member{"timeout", {.number = Role::kTimeout}},
    Member{"sequence_id", {.number = Role::kSequenceNumber, .text = Role::kSequenceText}},
    Member{"sequence_start", {}},
    Member{"sequence_end", {}},
    Member{"binary_data_output", {}},
};
constexpr std::array kRequestMembers{
    Member{"id", {.text = Role::kId}},
    Member{"inputs", {.element = &kInput}},
    Member{"outputs", {.element = &kOutput}},
    Member{"parameters", object_of(kParameters, &kCustom)},
};
constexpr Node kRequest = object_of(kRequestMembers);

const Node& member_of(const Node& owner, std::string_view name) {
  const Member* end = owner.members + owner.count;
  const Member* found =
      std::find_if(owner.members, end, [&](const Member& member) { return member.name == name; });
  if (found != end) return found->node;
  return owner.others == nullptr ? kNothing : *owner.others;
}

// Takes a string without control characters; says whether it has escapes.
bool take_string(JsonCursor& cursor, std::string_view& content, bool& escaped) {
  if (!cursor.take('"')) return false;
  const auto raw = cursor.raw_string();
  if (!raw) return false;
  content = *raw;
  bool control = false;
  for (const char letter : *raw) {
    control |= static_cast<unsigned char>(letter) < 0x20;
    escaped |= letter == '\\';
  }
  return !control;
}

// Takes an array, of which only the end is looked for.
bool take_array(JsonCursor& cursor) { return cursor.take('[') && cursor.skip_nested(); }

// Takes a number that may vary; nothing where it is another one.
std::optional<std::uint64_t> varying_number(const JsonNumber& number) {
  return number.negative ? std::nullopt : number.as<std::uint64_t>();
}

// Reads a header along the key and the places of the one that was scanned before.
class Follower {
 public:
  Follower(std::string_view text, RequestScan& scan) : text_(text), cursor_(text), scan_(scan) {}

  // False, with a part of the values, where the header has another key.
  bool run() {
    scan_.clear_values();
    std::string_view key = scan_.key;
    for (const ScannedPlace& place : scan_.places) {
      if (!cursor_.take(key.substr(0, place.literal)) || !value(place)) return false;
      key.remove_prefix(place.literal + 1);
    }
    return cursor_.take(key) && cursor_.at_end();
  }

 private:
  bool value(const ScannedPlace& place) {
    const std::size_t begin = cursor_.position();
    ScannedValue value{.role = place.role,
                       .owner = place.owner,
                       .name = text_.substr(begin - place.name_before, place.name_size)};
    if (place.role == Role::kValues) {
      if (!take_array(cursor_)) return false;
      value.text = cursor_.from(begin);
    } else if (is_text(place.role)) {
      bool escaped = false;
      if (!take_string(cursor_, value.text, escaped) || escaped) return false;
      if (!is_utf8(value.text)) return false;
    } else {
      const auto number = cursor_.number();
      const auto varying = number ? varying_number(*number) : std::nullopt;
      if (!varying) return false;
      value.number = *varying;
    }
    scan_.add(value);
    return true;
  }

  std::string_view text_;
  JsonCursor cursor_;
  RequestScan& scan_;
};

class Scanner {
 public:
  Scanner(std::string_view text, RequestScan& scan) : text_(text), cursor_(text), scan_(scan) {
    names_.reserve(kUsualNames);
  }

  bool run() {
    return document([&] { return object(kRequest); });
  }

  bool run_generated(std::span<const std::string> inputs) {
    return document([&] { return flat_object(inputs, false); });
  }

 private:
  template <typename Members>
  bool document(Members&& members) {
    cursor_.skip_space();
    if (!cursor_.take('{') || !members()) return false;
    cursor_.skip_space();
    if (!cursor_.at_end()) return false;
    return extend_key(text_.size() - literal_);
  }

  bool value(const Node& node) {
    if (node.array != Role::kNone) return values(node);
    switch (cursor_.peek()) {
      case '{':
        cursor_.next();
        return object(node);
      case '[':
        cursor_.next();
        return array(node);
      case '"':
        return text(node);
      case 't':
        return cursor_.take("true");
      case 'f':
        return cursor_.take("false");
      case 'n':
        return cursor_.take("null");
      default:
        return number(node);
    }
  }

  // Takes the items of an array or object, whose opening bracket has been taken, up to its end.
  template <typename Item>
  bool items(char end, Item&& item) {
    if (++depth_ > kDeepest) return false;
    cursor_.skip_space();
    if (!cursor_.take(end)) {
      do {
        cursor_.skip_space();
        if (!item()) return false;
        cursor_.skip_space();
      } while (cursor_.take(','));
      if (!cursor_.take(end)) return false;
    }
    --depth_;
    return true;
  }

  bool object(const Node& node) {
    const std::size_t first = names_.size();
    if (!items('}', [&] { return member(node, first); })) return false;
    names_.resize(first);
    return true;
  }

  bool member(const Node& owner, std::size_t first_name) {
    std::string_view name;
    return member_name(name, first_name) && value(member_of(owner, name));
  }

  // Takes a member's name, which is none of those since `first_name`, and what is before its value.
  bool member_name(std::string_view& name, std::size_t first_name) {
    bool escaped = false;
    if (!take_string(cursor_, name, escaped) || escaped) return false;
    const auto begin = names_.begin() + static_cast<std::ptrdiff_t>(first_name);
    if (names_.size() - first_name >= kMostMembers) return false;
    if (std::find(begin, names_.end(), name) != names_.end()) return false;
    names_.push_back(name);
    cursor_.skip_space();
    if (!cursor_.take(':')) return false;
    cursor_.skip_space();
    return true;
  }

  // The members of a generate request, and those of its parameters, whose names are of one space.
  bool flat_object(std::span<const std::string> inputs, bool nested) {
    return items('}', [&] {
      std::string_view name;
      if (!member_name(name, 0)) return false;
      if (name == "parameters" && !nested) return cursor_.take('{') && flat_object(inputs, true);
      if (std::ranges::find(inputs, name) != inputs.end()) return flat_input();
      if (name == "id" && !nested) return flat_id();
      return cursor_.peek() != '{' && cursor_.peek() != '[' && value(kCustom);
    });
  }

  bool flat_input() {
    owner_ = scan_.inputs++;
    scan_.ranks.push_back(0);
    const std::size_t begin = cursor_.position();
    std::uint64_t count = 1;
    if (cursor_.take('[') ? !flat_values(count) : !flat_value()) return false;
    scan_.counts.push_back(count);
    return replace(begin, {.role = Role::kValues, .owner = owner_, .text = cursor_.from(begin)});
  }

  // Counts the values of an array, whose bracket has been taken, by their commas.
  bool flat_values(std::uint64_t& count) {
    cursor_.skip_space();
    count = cursor_.peek() == ']' ? 0 : 1;
    while (!cursor_.at_end()) {
      const char letter = cursor_.next();
      if (letter == '[' || letter == '{') return false;
      if (letter == '"' && !cursor_.raw_string()) return false;
      if (letter == ',') ++count;
      if (letter == ']') return true;
    }
    return false;
  }

  bool flat_value() {
    if (cursor_.take('"')) return cursor_.raw_string().has_value();
    return cursor_.take("true") || cursor_.take("false") || cursor_.number().has_value();
  }

  bool flat_id() {
    const std::size_t begin = cursor_.position();
    std::string_view content;
    bool escaped = false;
    if (!take_string(cursor_, content, escaped) || escaped || !is_utf8(content)) return false;
    scan_.id = content;
    return replace(begin, {.role = Role::kCustomText, .text = content, .name = names_.back()});
  }

  bool array(const Node& node) {
    const Node& element = node.element == nullptr ? kNothing : *node.element;
    return items(']', [&] {
      begin_element(element);
      return value(element);
    });
  }

  bool values(const Node& node) {
    const std::size_t begin = cursor_.position();
    if (!take_array(cursor_)) return false;
    return replace(begin, {.role = node.array, .owner = owner_, .text = cursor_.from(begin)});
  }

  void begin_element(const Node& element) {
    if (&element == &kInput) {
      owner_ = scan_.inputs++;
      scan_.ranks.push_back(0);
    } else if (&element == &kOutput) {
      owner_ = scan_.outputs++;
    }
  }

  bool text(const Node& node) {
    const std::size_t begin = cursor_.position();
    std::string_view content;
    bool escaped = false;
    if (!take_string(cursor_, content, escaped)) return false;
    if (node.text == Role::kId && escaped) return false;
    if (node.text == Role::kNone || escaped) return true;
    if (!is_utf8(content)) return false;
    return replace(begin,
                   {.role = node.text, .owner = owner_, .text = content, .name = name_of(node)});
  }

  bool number(const Node& node) {
    const std::size_t begin = cursor_.position();
    const auto number = cursor_.number();
    if (!number) return false;
    const auto value = node.number == Role::kNone ? std::nullopt : varying_number(*number);
    if (!value) return true;
    return replace(begin,
                   {.role = node.number, .owner = owner_, .number = *value, .name = name_of(node)});
  }

  [[nodiscard]] std::string_view name_of(const Node& node) const {
    return &node == &kCustom ? names_.back() : std::string_view{};
  }

  // Puts the marker into the key instead of what was read since `begin`.
  bool replace(std::size_t begin, const ScannedValue& value) {
    const std::size_t literal = begin - literal_;
    if (!extend_key(literal)) return false;
    scan_.key.push_back(static_cast<char>(value.role));
    scan_.places.push_back({.role = value.role,
                            .owner = value.owner,
                            .literal = literal,
                            .name_before = name_before(begin, value.name),
                            .name_size = value.name.size()});
    literal_ = cursor_.position();
    scan_.add(value);
    return true;
  }

  [[nodiscard]] std::size_t name_before(std::size_t begin, std::string_view name) const {
    if (name.empty()) return 0;
    return begin - static_cast<std::size_t>(name.data() - text_.data());
  }

  // Appends the next bytes of the text as they stand; false where the key becomes too long.
  bool extend_key(std::size_t size) {
    if (size > kLongestScanned - scan_.key.size()) return false;
    scan_.key.append(text_.substr(literal_, size));
    return scan_.key.size() < kLongestScanned;
  }

  std::string_view text_;
  JsonCursor cursor_;
  std::size_t literal_ = 0;  // where what is not in the key yet begins
  RequestScan& scan_;
  std::vector<std::string_view> names_;  // Of the members of all objects around this place.
  std::uint32_t owner_ = 0;
  int depth_ = 0;
};

}  // namespace

bool scan_json(std::string_view text, RequestScan& scan) {
  if (text.size() > kLongestJson) return false;
  if (!scan.places.empty() && Follower(text, scan).run()) return true;
  scan.clear();
  if (!Scanner(text, scan).run()) {
    scan.clear();
    return false;
  }
  if (scan.places.size() > kMostPlaces) scan.places = {};
  return true;
}

bool scan_generated(std::string_view text, std::span<const std::string> inputs, RequestScan& scan) {
  scan.clear();
  const bool scanned = text.size() <= kLongestJson && Scanner(text, scan).run_generated(inputs);
  scan.places.clear();
  return scanned;
}

}  // namespace gpubridge
