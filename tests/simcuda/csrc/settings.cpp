#include "settings.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <set>
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

Setter text_of(std::string Settings::* member, std::set<std::string> texts) {
  return [member, texts = std::move(texts)](Settings& all, const std::string& given) {
    all.*member = given;
    return texts.count(given) != 0;
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
      {"EXITED_RECORDER", word(&Settings::exited_recorder, {{"passes", ExitedRecorder::kPasses},
                                                            {"never", ExitedRecorder::kNever},
                                                            {"lost", ExitedRecorder::kLost}})},
      {"UNKNOWN", word(&Settings::unknown_sticks, {{"passes", false}, {"sticks", true}})},
      {"LOST_DEVICE", number(&Settings::lost_device)},
      {"CONTEXT_US", number(&Settings::context_us)},
      {"CONTEXT_MIB", number(&Settings::context_mib)},
      {"OPENS",
       text_of(&Settings::opens, {"all", "no-handles", "no-descriptors", "no-events", "nothing"})},
      {"OPEN_ERROR", number(&Settings::open_error)},
      {"SHM", text(&Settings::shm)},
      {"EVENT_LIMIT", number(&Settings::event_limit)},
      {"PAGEABLE", word(&Settings::pageable_waits, {{"staged", false}, {"waits", true}})},
  };
  return all;
}

// The machine's settings and the process's own, by name.
std::map<std::string, std::string> read_texts() {
  std::map<std::string, std::string> found;
  std::ifstream file(world_path("settings"));
  for (std::string line; std::getline(file, line);) {
    const auto end = line.find('=');
    found[line.substr(0, end)] = line.substr(end + 1);
  }
  for (const auto& [name, set] : setters())
    if (const char* text = std::getenv((kSettingPrefix + name).c_str())) found[name] = text;
  return found;
}

Settings read_all() {
  Settings found;
  for (const auto& [name, text] : read_texts()) {
    const auto setter = setters().find(name);
    if (setter == setters().end()) {
      violation(kSettingPrefix + name + " is no setting of the simulated driver");
    } else if (!setter->second(found, text)) {
      violation(kSettingPrefix + name + " cannot be '" + text + "'");
    }
  }
  return found;
}

// Settings that were read, and those before them, which threads may still use.
struct Version {
  std::uint64_t number;
  Settings all;
  const Version* before;
};

}  // namespace

const Settings& settings() {
  static std::atomic<const Version*> last{nullptr};
  const std::uint64_t number = control().settings_version.load();
  const Version* known = last.load();
  if (known == nullptr || known->number != number) {
    known = new Version{number, read_all(), known};
    last.store(known);
  }
  return known->all;
}

CUresult refused_opening(const std::string& kind) {
  const std::string& opens = settings().opens;
  return opens == "nothing" || opens == "no-" + kind ? settings().open_error : kSuccess;
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
