#include "settings.h"

#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>

#include "world.h"

namespace {

const std::string kPrefix = "SIMCUDA_";

const std::map<std::string, int Settings::*>& numbers() {
  static const std::map<std::string, int Settings::*> all = {
      {"PIN_US_PER_MIB", &Settings::pin_us_per_mib},
      {"PIN_US_PER_MIB_UNTOUCHED", &Settings::pin_us_per_mib_untouched},
  };
  return all;
}

Settings read_all() {
  Settings found;
  for (const auto& [name, member] : numbers())
    if (const char* text = std::getenv((kPrefix + name).c_str())) {
      char* end = nullptr;
      found.*member = static_cast<int>(std::strtol(text, &end, 10));
      if (end == text || *end != 0) violation("expected a number in " + kPrefix + name);
    }
  return found;
}

}  // namespace

const Settings& settings() {
  static const Settings all = read_all();
  return all;
}

void check_settings() {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (text.compare(0, kPrefix.size(), kPrefix) != 0) continue;
    const std::string name = text.substr(kPrefix.size(), text.find('=') - kPrefix.size());
    if (name != "DIR" && name != "KERNEL" && numbers().count(name) == 0)
      violation(kPrefix + name + " is no setting of the simulated driver");
  }
  settings();
}
