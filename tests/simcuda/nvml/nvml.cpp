// NVIDIA's management library for the simulated machine: its PCIe counters tell what the simulated
// driver has copied between host and devices, begin before they wrap, and wrap at 32 bits.
// SIMNVML says what it is of: "old" (a driver that does not count), "vgpu", or "wide" (64 bits).
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#define NVML_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;
constexpr std::uint64_t kFirst = 0xFFFFF000;

struct FieldValue {
  unsigned field, scope;
  long long timestamp, latency;
  int value_type, code;
  unsigned long long value;
};
static_assert(sizeof(FieldValue) == 40);

bool is(const char* what) {
  const char* said = std::getenv("SIMNVML");
  return said != nullptr && std::strcmp(said, what) == 0;
}

// Reads what the driver has recorded since the last time: "PID cuMemcpyHtoDAsync(BYTES,...)=0".
class Copies {
 public:
  std::uint64_t to_device = kFirst, to_host = kFirst;

  void look() {
    std::ifstream file(std::string(std::getenv("SIMCUDA_DIR")) + "/calls");
    file.seekg(at_);
    for (std::string line; std::getline(file, line) && !file.eof(); at_ = file.tellg()) {
      const auto name = line.find(' ') + 1;
      const auto bytes = line.find('(');
      if (line.size() < 2 || line.substr(line.size() - 2) != "=0") continue;
      if (line.compare(name, 12, "cuMemcpyHtoD") == 0)
        to_device += std::strtoull(line.c_str() + bytes + 1, nullptr, 10);
      else if (line.compare(name, 12, "cuMemcpyDtoH") == 0)
        to_host += std::strtoull(line.c_str() + bytes + 1, nullptr, 10);
    }
  }

 private:
  std::streamoff at_ = 0;
};

Copies& g_copies = *new Copies;

}  // namespace

NVML_API int nvmlInit_v2() { return 0; }

NVML_API const char* nvmlErrorString(int code) {
  return code == kNotFound ? "Not Found" : "Not Supported";
}

NVML_API int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  *device = &g_copies;
  return std::strncmp(uuid, "GPU-", 4) == 0 ? 0 : kNotFound;
}

NVML_API int nvmlDeviceGetVirtualizationMode(void*, unsigned* mode) {
  *mode = is("vgpu") ? 2 : 0;
  return 0;
}

NVML_API int nvmlSystemGetDriverVersion(char* release, unsigned) {
  std::strcpy(release, "555.42");
  return 0;
}

NVML_API int nvmlDeviceGetIndex(void*, unsigned* index) {
  *index = 0;
  return 0;
}

NVML_API int nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* generation) {
  *generation = 3;
  return 0;
}

NVML_API int nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* width) {
  *width = 4;
  return 0;
}

// The link of an idle GPU is slower.
NVML_API int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* generation) {
  *generation = 1;
  return 0;
}

NVML_API int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* width) {
  *width = 4;
  return 0;
}

NVML_API int nvmlDeviceGetFieldValues(void*, int count, FieldValue* values) {
  g_copies.look();
  for (FieldValue* value = values; value < values + count; ++value) {
    value->code = is("old") || value->field < 197 || value->field > 198 ? kNotSupported : 0;
    value->value = value->field == 197 ? g_copies.to_host : g_copies.to_device;
    if (!is("wide")) value->value &= 0xFFFFFFFF;
  }
  return 0;
}
