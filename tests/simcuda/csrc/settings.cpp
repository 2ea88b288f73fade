#include "settings.h"

#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <string>

#include "world.h"

namespace {

// Sets what a text says; false if it says nothing that can be set.
using Setter = std::function<bool(Settings&, const std::string&)>;

const std::string kSettingPrefix = "SIMCUDA_";

Setter number(int Settings::* member) {
  return [member](Settings& all, const std::string& text) {
    char* end = nullptr;
    all.*member = static_cast<int>(std::strtol(text.c_str(), &end, 10));
    return !text.empty() && *end == 0;
  };
}

Setter text(std::string Settings::* member) {
  return [member](Settings& all, const std::string& given) {
    all.*member = given;
    return !given.empty();
  };
}

template <typename T>
Setter word(T Settings::* member, std::map<std::string, T> words) {
  return [member, words = std::move(words)](Settings& all, const std::string& text) {
    const auto found = words.find(text);
    if (found != words.end()) all.*member = found->second;
    return found != words.end();
  };
}

const std::map<std::string, Setter>& setters() {
  static const std::map<std::string, Setter> all = {
      {"DRIVER_VERSION", number(&Settings::driver_version)},
      {"NVRTC_VERSION", number(&Settings::nvrtc_version)},
      {"ARCHITECTURE", number(&Settings::architecture)},
      {"PIN_US_PER_MIB", number(&Settings::pin_us_per_mib)},
      {"PIN_US_PER_MIB_UNTOUCHED", number(&Settings::pin_us_per_mib_untouched)},
      {"ALLOCATE_US", number(&Settings::allocate_us)},
      {"OPEN_US", number(&Settings::open_us)},
      {"CLOSE_US", number(&Settings::close_us)},
      {"DESTROYED", word(&Settings::destroyed, {{"reused", Destroyed::kReused},
                                                {"refused", Destroyed::kRefused},
                                                {"crash", Destroyed::kCrash}})},
      {"SAME_BLOCK", word(&Settings::same_block, {{"counted", SameBlock::kCounted},
                                                  {"refused", SameBlock::kRefused},
                                                  {"closed-once", SameBlock::kClosedOnce}})},
      {"DEAD_EXPORTER", word(&Settings::dead_exporter, {{"fault", DeadExporter::kFault},
                                                        {"stale", DeadExporter::kStale},
                                                        {"held", DeadExporter::kHeld}})},
      {"KILLED_RECORDER", word(&Settings::killed_recorder, {{"rerecord", KilledRecorder::kRerecord},
                                                            {"released", KilledRecorder::kReleased},
                                                            {"never", KilledRecorder::kNever}})},
      {"SHM", text(&Settings::shm)},
      {"EVENT_LIMIT", number(&Settings::event_limit)},
      {"PAGEABLE", word(&Settings::pageable_waits, {{"staged", false}, {"waits", true}})},
  };
  return all;
}

Settings read_all() {
  Settings found;
  for (const auto& [name, set] : setters()) {
    const char* text = std::getenv((kSettingPrefix + name).c_str());
    if (text != nullptr && !set(found, text))
      violation(kSettingPrefix + name + " cannot be '" + text + "'");
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
    if (text.compare(0, kSettingPrefix.size(), kSettingPrefix) != 0) continue;
    const std::string name =
        text.substr(kSettingPrefix.size(), text.find('=') - kSettingPrefix.size());
    if (name != "DIR" && name != "KERNEL" && setters().count(name) == 0)
      violation(kSettingPrefix + name + " is no setting of the simulated driver");
  }
  settings();
}
