// A record written anew from what was read of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fuzz.h"
#include "ipc/records.h"

namespace gpubridge::fuzz {

inline std::string rewritten(const RecordView& record) {
  RecordParts parts;
  parts.ticket = record.ticket();
  parts.word = record.word();
  parts.tensors = static_cast<std::uint32_t>(record.tensors());
  parts.signature = record.signature();
  parts.context = record.context();
  parts.identifier = record.identifier();
  parts.dims = record.dims();
  std::string bytes(parts.size(), '\0');
  char* at = parts.write(bytes.data());
  for (std::size_t index = 0; index < record.tensors(); ++index) {
    at = write_ref(at, record.ref(index));
  }
  expect(at == bytes.data() + bytes.size(), "a record has its size");
  return bytes;
}

}  // namespace gpubridge::fuzz
