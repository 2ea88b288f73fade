// Feeds files, and the files of folders, to a fuzz target: for compilers without libFuzzer.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void feed(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  // A buffer of just that size, whose end the sanitizer guards.
  const std::vector<std::uint8_t> input(bytes.begin(), bytes.end());
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

}  // namespace

int main(int count, char** arguments) {
  std::size_t fed = 0;
  for (int index = 1; index < count; ++index) {
    const std::filesystem::path place(arguments[index]);
    if (!std::filesystem::is_directory(place)) {
      feed(place);
      ++fed;
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(place)) {
      feed(entry.path());
      ++fed;
    }
  }
  std::printf("%zu inputs\n", fed);
  return fed == 0 ? 1 : 0;
}
