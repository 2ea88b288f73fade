// A compiler that compiles nothing: its output has the form of what was asked for, for the
// architecture that was asked for, and names the source's length; the simulated driver looks at the
// form, and runs the library that SIMCUDA_KERNEL names.
#include <elf.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define NVRTC_API extern "C" __attribute__((visibility("default")))

struct Program {
  std::string source;
  std::string options;
  std::string log;
};

namespace {

constexpr int kCompilation = 6;

constexpr int kElfCuda = 190;
const std::string kArchitecture = "--gpu-architecture=";

int copy_out(const std::string& bytes, char* target) {
  std::memcpy(target, bytes.data(), bytes.size());
  return 0;
}

int version() {
  const char* set = std::getenv("SIMCUDA_NVRTC_VERSION");
  return set == nullptr ? 12090 : std::atoi(set);
}

// Release 13 compiles for nothing older than 7.5.
std::vector<int> architectures() {
  if (version() < 13000) return {70, 75, 80, 90};
  return {75, 80, 90};
}

// The number behind `sm_` or `compute_`.
int architecture(const Program* program) {
  const std::size_t at = program->options.find(kArchitecture);
  if (at == std::string::npos) return 0;
  return std::atoi(program->options.c_str() + program->options.find('_', at) + 1);
}

std::string remark(const Program* program) {
  return "simulated " + std::to_string(program->source.size()) + program->options;
}

std::string cubin(const Program* program) {
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_ident[EI_ABIVERSION] = version() < 13000 ? 7 : 8;
  header.e_machine = kElfCuda;
  header.e_flags = static_cast<unsigned>(architecture(program));
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + remark(program);
}

// Its end is part of it.
std::string ptx(const Program* program) {
  return "// " + remark(program) + "\n.version " + std::to_string(version() / 1000 - 4) +
         ".0\n.target sm_" + std::to_string(architecture(program)) + "\n" + std::string(1, 0);
}

}  // namespace

NVRTC_API int nvrtcVersion(int* major, int* minor) {
  *major = version() / 1000;
  *minor = version() % 1000 / 10;
  return 0;
}

NVRTC_API const char* nvrtcGetErrorString(int) { return "simulated"; }

NVRTC_API int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(architectures().size());
  return 0;
}

NVRTC_API int nvrtcGetSupportedArchs(int* archs) {
  for (const int each : architectures()) *archs++ = each;
  return 0;
}

NVRTC_API int nvrtcCreateProgram(Program** program, const char* source, const char*, int,
                                 const char* const*, const char* const*) {
  *program = new Program{source, "", ""};
  return 0;
}

NVRTC_API int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

NVRTC_API int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  for (int i = 0; i < count; ++i) program->options += std::string(" ") + options[i];
  if (std::getenv("SIMCUDA_KERNEL") != nullptr) return 0;
  program->log = "error: no SIMCUDA_KERNEL";
  return kCompilation;
}

NVRTC_API int nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}

NVRTC_API int nvrtcGetProgramLog(Program* program, char* log) {
  return copy_out(program->log + std::string(1, 0), log);
}

NVRTC_API int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  *size = cubin(program).size();
  return 0;
}

NVRTC_API int nvrtcGetCUBIN(Program* program, char* image) {
  return copy_out(cubin(program), image);
}

NVRTC_API int nvrtcGetPTXSize(Program* program, std::size_t* size) {
  *size = ptx(program).size();
  return 0;
}

NVRTC_API int nvrtcGetPTX(Program* program, char* image) { return copy_out(ptx(program), image); }
