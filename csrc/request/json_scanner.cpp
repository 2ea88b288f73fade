#include "request/json_cursor.h"
#include "request/json_values.h"
#include "request/scan.h"
#include "text.h"

namespace gpubridge {
namespace {

constexpr int kDeepest = 16;
constexpr std::size_t kMostMembers = 64;

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

class Scanner {
 public:
  Scanner(std::string_view text, RequestScan& scan) : text_(text), cursor_(text), scan_(scan) {}

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
    if (!string(name, escaped) || escaped) return false;
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
    if (!string(content, escaped) || escaped || !is_utf8(content)) return false;
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
    if (!cursor_.take('[') || !cursor_.skip_nested()) return false;
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

  // Takes a string without control characters; says whether it has escapes.
  bool string(std::string_view& content, bool& escaped) {
    if (!cursor_.take('"')) return false;
    const auto raw = cursor_.raw_string();
    if (!raw) return false;
    content = *raw;
    bool control = false;
    for (const char letter : *raw) {
      control |= static_cast<unsigned char>(letter) < 0x20;
      escaped |= letter == '\\';
    }
    return !control;
  }

  bool text(const Node& node) {
    const std::size_t begin = cursor_.position();
    std::string_view content;
    bool escaped = false;
    if (!string(content, escaped)) return false;
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
    if (node.number == Role::kNone || number->negative) return true;
    const auto value = number->as<std::uint64_t>();
    if (!value) return true;
    return replace(begin,
                   {.role = node.number, .owner = owner_, .number = *value, .name = name_of(node)});
  }

  [[nodiscard]] std::string_view name_of(const Node& node) const {
    return &node == &kCustom ? names_.back() : std::string_view{};
  }

  // Puts the marker into the key instead of what was read since `begin`.
  bool replace(std::size_t begin, const ScannedValue& value) {
    if (!extend_key(begin - literal_)) return false;
    scan_.key.push_back(static_cast<char>(value.role));
    literal_ = cursor_.position();
    scan_.add(value);
    return true;
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
  std::vector<std::string_view> names_;
  std::uint32_t owner_ = 0;
  int depth_ = 0;
};

}  // namespace

bool scan_json(std::string_view text, RequestScan& scan) {
  scan.clear();
  return text.size() <= kLongestJson && Scanner(text, scan).run();
}

bool scan_generated(std::string_view text, std::span<const std::string> inputs, RequestScan& scan) {
  scan.clear();
  return text.size() <= kLongestJson && Scanner(text, scan).run_generated(inputs);
}

}  // namespace gpubridge
