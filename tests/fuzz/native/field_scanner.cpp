// Messages of gRPC that come in pieces: however they are cut, the same is found in them, and it
// lies in them.
#include "request/field_scanner.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fuzz.h"

namespace {

using gpubridge::FieldScanner;
using gpubridge::MessageFault;
using gpubridge::fuzz::expect;

// What is found in a message.
struct Found {
  std::string form;
  std::string identifier;
  std::vector<std::pair<std::size_t, std::uint64_t>> raws;  // where they begin, and their bytes
  std::size_t inputs = 0;
  std::string fault;

  bool operator==(const Found&) const = default;
};

// Scans a message in pieces of so many bytes, one after the other and again from the first.
Found scan(std::string_view message, const std::vector<std::size_t>& pieces) {
  Found found;
  try {
    FieldScanner scanner(message.size());
    std::size_t at = 0;
    for (std::size_t number = 0; at < message.size(); ++number) {
      const std::string_view piece = message.substr(at, pieces[number % pieces.size()]);
      const std::size_t taken = scanner.feed(piece);
      expect(taken <= piece.size(), "no more is taken than there is");
      at += taken;
      expect(scanner.raw().has_value() || taken == piece.size(), "only raw contents stop it");
      if (const auto& raw = scanner.raw()) {
        expect(*raw <= message.size() - at, "raw contents lie in the message");
        found.raws.emplace_back(at, *raw);
        at += static_cast<std::size_t>(*raw);
        scanner.pass_raw();
      }
      expect(scanner.left() == message.size() - at, "what is left is still to come");
    }
    found.form = scanner.form();
    found.identifier = scanner.identifier();
    found.inputs = scanner.inputs();
    if (const auto name = scanner.model_name()) {
      expect(found.form.find(*name) != std::string::npos, "the model's name is in the form");
    }
  } catch (const MessageFault& fault) {
    found = {};
    found.fault = fault.reason.empty() ? "too many fields" : fault.reason;
  }
  return found;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gpubridge::fuzz::Input input(data, size);
  std::vector<std::size_t> pieces(input.byte() % 4 + 1U);
  for (std::size_t& piece : pieces) piece = input.byte() % 32 + 1U;
  const std::string_view message = input.text();
  const Found whole = scan(message, {std::max<std::size_t>(message.size(), 1)});
  expect(scan(message, pieces) == whole, "it does not matter how a message is cut");
  if (!whole.fault.empty()) return 0;
  const Found again = scan(whole.form, pieces);
  expect(again.form == whole.form && again.inputs == whole.inputs, "a form is a message");
  expect(again.raws.empty() && again.identifier.empty(), "of neither id nor raw contents");
  return 0;
}
