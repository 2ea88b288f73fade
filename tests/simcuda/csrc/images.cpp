#include "images.h"

#include <elf.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "settings.h"

namespace {

constexpr int kElfCuda = 190;
// Cubins of CUDA 13 have a version of their own, which older drivers do not know.
constexpr int kAbiOfRelease13 = 8;
// The first release of PTX: 7 was that of CUDA 11, 8 of 12, 9 of 13.
constexpr int kReleaseOfPtx = 4;

CUresult refused_cubin(const Elf64_Ehdr& header) {
  if (header.e_machine != kElfCuda) return kInvalidImage;
  if (header.e_ident[EI_ABIVERSION] >= kAbiOfRelease13 && settings().driver_version < 13000)
    return kInvalidImage;
  // It runs on devices of its generation that are not older.
  const int architecture = static_cast<int>(header.e_flags & 0xFFU);
  return architecture / 10 == settings().architecture / 10 &&
                 architecture <= settings().architecture
             ? kSuccess
             : kNoBinaryForGpu;
}

CUresult refused_ptx(const char* text) {
  const char* version = std::strstr(text, ".version ");
  const char* target = std::strstr(text, ".target sm_");
  int release = 0;
  int architecture = 0;
  if (version == nullptr || target == nullptr ||
      std::sscanf(version, ".version %d", &release) != 1 ||
      std::sscanf(target, ".target sm_%d", &architecture) != 1)
    return kInvalidPtx;
  if (release + kReleaseOfPtx > settings().driver_version / 1000) return kUnsupportedPtxVersion;
  return architecture <= settings().architecture ? kSuccess : kNoBinaryForGpu;
}

}  // namespace

CUresult refused_image(const void* image) {
  if (image == nullptr) return kInvalidImage;
  if (std::memcmp(image, ELFMAG, SELFMAG) == 0) {
    Elf64_Ehdr header{};
    std::memcpy(&header, image, sizeof header);
    return refused_cubin(header);
  }
  // Text is read to its end; of anything else that is nobody's to say.
  const char* text = static_cast<const char*>(image);
  return std::strncmp(text, "//", 2) == 0 || std::strncmp(text, ".version", 8) == 0
             ? refused_ptx(text)
             : kInvalidImage;
}
