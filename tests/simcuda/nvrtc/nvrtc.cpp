// A compiler that compiles nothing: its output names the source's length, and the simulated driver
// runs the library that SIMCUDA_KERNEL names, whatever it is given.
#include <cstdlib>
#include <cstring>
#include <string>

#define NVRTC_API extern "C" __attribute__((visibility("default")))

struct Program {
  std::string source;
  std::string options;
  std::string log;
};

namespace {

constexpr int kCompilation = 6;

int copy_out(const std::string& text, char* target) {
  std::memcpy(target, text.c_str(), text.size() + 1);
  return 0;
}

std::string output(const Program* program) {
  return "simulated " + std::to_string(program->source.size()) + program->options;
}

}  // namespace

NVRTC_API int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 9;
  return 0;
}

NVRTC_API const char* nvrtcGetErrorString(int) { return "simulated"; }

NVRTC_API int nvrtcGetNumSupportedArchs(int* count) {
  *count = 2;
  return 0;
}

NVRTC_API int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80;
  archs[1] = 90;
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
  return copy_out(program->log, log);
}

NVRTC_API int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  *size = output(program).size() + 1;
  return 0;
}

NVRTC_API int nvrtcGetCUBIN(Program* program, char* image) {
  return copy_out(output(program), image);
}
