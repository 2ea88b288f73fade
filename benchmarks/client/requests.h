// Requests as benchmarks/traffic.py writes them, and the numbers that make each one another.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

[[noreturn]] inline void fail(const std::string& reason) {
  std::fprintf(stderr, "%s\n", reason.c_str());
  std::exit(1);
}

// What a slot is filled with. A number of decimal digits does not begin with a zero.
// kShared is a float as kFloat, in the connection's region of shared memory.
enum class Fill : std::uint32_t { kDecimal, kFloat, kSequence, kConnection, kShared };

struct Slot {
  std::uint32_t offset;
  std::uint32_t width;
  Fill fill;
};

struct Request {
  std::vector<Slot> slots;
  std::string bytes;
};

struct Traffic {
  // Begins the names in /dev/shm of the connections' regions; empty without such.
  std::string regions;
  // Each connection sends all requests from the first to the last; else they share one turn.
  bool in_order = false;
  std::vector<Request> requests;
};

inline Traffic read_traffic(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::size_t at = 0;
  const auto number = [&] {
    std::uint32_t value = 0;
    if (text.size() - at < sizeof(value)) fail("the file of requests is cut off");
    std::memcpy(&value, text.data() + at, sizeof(value));
    at += sizeof(value);
    return value;
  };
  const auto bytes = [&](std::uint32_t size) {
    if (text.size() - at < size) fail("the file of requests is cut off");
    at += size;
    return text.substr(at - size, size);
  };
  Traffic traffic;
  traffic.regions = bytes(number());
  traffic.in_order = number() != 0;
  traffic.requests.resize(number());
  for (Request& request : traffic.requests) {
    request.slots.resize(number());
    for (Slot& slot : request.slots) slot = {number(), number(), static_cast<Fill>(number())};
    request.bytes = bytes(number());
  }
  if (traffic.requests.empty()) fail("the file has no request");
  return traffic;
}

// Numbers that a connection writes into a request.
struct Numbers {
  std::uint64_t turn;
  std::uint64_t sequence;
  std::uint64_t connection;
  char* region;  // its shared memory, or null
};

inline void write_decimal(std::uint64_t value, const Slot& slot, std::string& bytes) {
  for (std::uint32_t place = slot.width; place-- > 0; value /= 10) {
    bytes[slot.offset + place] = static_cast<char>('0' + value % 10);
  }
  if (bytes[slot.offset] == '0' && slot.fill != Fill::kConnection) bytes[slot.offset] = '9';
}

inline void fill_slots(Request& request, const Numbers& numbers) {
  for (const Slot& slot : request.slots) {
    if (slot.fill == Fill::kFloat || slot.fill == Fill::kShared) {
      // A float from 1 up to 2.
      const auto bits = static_cast<std::uint32_t>(0x3F800000U | (numbers.turn & 0x7FFFFFU));
      char* const base = slot.fill == Fill::kFloat ? request.bytes.data() : numbers.region;
      std::memcpy(base + slot.offset, &bits, sizeof(bits));
    } else if (slot.fill == Fill::kDecimal) {
      write_decimal(numbers.turn, slot, request.bytes);
    } else {
      const bool sequence = slot.fill == Fill::kSequence;
      write_decimal(sequence ? numbers.sequence : numbers.connection, slot, request.bytes);
    }
  }
}

// Maps a connection's region, which somebody else has made; it stays mapped until the process ends.
inline char* map_region(const std::string& prefix, std::size_t connection) {
  std::string number = std::to_string(connection);
  number.insert(0, 4 - std::min<std::size_t>(4, number.size()), '0');
  const std::string path = "/dev/shm/" + prefix + number;
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status{};
  if (descriptor < 0 || ::fstat(descriptor, &status) != 0) fail("cannot open " + path);
  void* const mapped = ::mmap(nullptr, static_cast<std::size_t>(status.st_size),
                              PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) fail("cannot map " + path);
  ::close(descriptor);
  return static_cast<char*>(mapped);
}
