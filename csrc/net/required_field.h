// A header that requests for a group of endpoints must have: its name, and the secret values of
// which each opens them. Two are known while clients change from one to the other.
#pragma once

#include "std.h"
#include "text.h"

namespace gpubridge {

class RequiredField {
 public:
  // The name is in lower case.
  RequiredField(std::string name, std::vector<std::string> values)
      : name_(std::move(name)), values_(std::move(values)) {}

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::vector<std::string>& values() const { return values_; }
  // Requests from now on need one of these values.
  void set_values(std::vector<std::string> values) { values_ = std::move(values); }

  // All values are compared, so that the time does not say which is nearly right.
  [[nodiscard]] bool admits(std::string_view given) const {
    bool known = false;
    for (const std::string& value : values_) known = equal_secret(given, value) || known;
    return known;
  }

 private:
  std::string name_;
  std::vector<std::string> values_;
};

}  // namespace gpubridge
