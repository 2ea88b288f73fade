// The context of a request, call or response, which is a record without its tensors: one table of
// fields, and their encoding. gpubridge/transport/context.py has the same in Python, and documents
// each field.
#pragma once

#include "std.h"

namespace gpubridge {

enum class ContextKind : std::uint8_t { kU64, kI64, kText, kJson, kFlag };

// The number of a field is the bit that says it is there.
enum class ContextField : std::uint8_t {
  kFlags,
  kCorrelationId,
  kCorrelationText,
  kTimeout,
  kParameters,
  kTrace,
  kShared,
  kState,
  kControls,
  kClient,
  kDevice,
  kDeviceOutputs,
  kWaits,
  kEvent,
  kEventLease,
  kModel,
  kVersion,
  kDecoupled,
  kHandedOn,
  kHostOutputs,
  kError,
  kCode,
  kPassedOn,
  kSetAside,
  kOutputsFor,
  kTraceContext,
  kSpan,
};

struct ContextFieldSpec {
  std::string_view name;
  ContextKind kind;
};

inline constexpr std::array kContextFields{
    ContextFieldSpec{"flags", ContextKind::kU64},
    ContextFieldSpec{"correlation_id", ContextKind::kU64},
    ContextFieldSpec{"correlation_text", ContextKind::kText},
    ContextFieldSpec{"timeout", ContextKind::kU64},
    ContextFieldSpec{"parameters", ContextKind::kText},
    ContextFieldSpec{"trace", ContextKind::kU64},
    ContextFieldSpec{"shared", ContextKind::kFlag},
    ContextFieldSpec{"state", ContextKind::kJson},
    ContextFieldSpec{"controls", ContextKind::kJson},
    ContextFieldSpec{"client", ContextKind::kJson},
    ContextFieldSpec{"device", ContextKind::kText},
    ContextFieldSpec{"device_outputs", ContextKind::kJson},
    ContextFieldSpec{"waits", ContextKind::kJson},
    ContextFieldSpec{"event", ContextKind::kU64},
    ContextFieldSpec{"event_lease", ContextKind::kU64},
    ContextFieldSpec{"model", ContextKind::kText},
    ContextFieldSpec{"version", ContextKind::kI64},
    ContextFieldSpec{"decoupled", ContextKind::kFlag},
    ContextFieldSpec{"handed_on", ContextKind::kFlag},
    ContextFieldSpec{"host_outputs", ContextKind::kFlag},
    ContextFieldSpec{"error", ContextKind::kText},
    ContextFieldSpec{"code", ContextKind::kU64},
    ContextFieldSpec{"passed_on", ContextKind::kFlag},
    ContextFieldSpec{"set_aside", ContextKind::kU64},
    ContextFieldSpec{"outputs_for", ContextKind::kText},
    ContextFieldSpec{"trace_context", ContextKind::kText},
    ContextFieldSpec{"span", ContextKind::kU64},
};
static_assert(kContextFields.size() == static_cast<std::size_t>(ContextField::kSpan) + 1);

constexpr std::uint32_t context_bit(ContextField field) {
  return std::uint32_t{1} << static_cast<unsigned>(field);
}

// Bytes that are no context; the text says why.
class MalformedContext : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The fields that are present, and their values. Texts and JSON are views of bytes that others own.
class Context {
 public:
  // Reads a context; `known` has the bits of the fields that it may have. Throws MalformedContext.
  // Texts are UTF-8 then, JSON is not looked into.
  static Context read(std::string_view raw, std::uint32_t known);

  [[nodiscard]] std::uint32_t mask() const { return mask_; }
  [[nodiscard]] bool has(ContextField field) const { return (mask_ & context_bit(field)) != 0; }
  // The value of a field of kind u64 or i64 (as it lies in memory); 0 where it is absent.
  [[nodiscard]] std::uint64_t number(ContextField field) const { return numbers_[index(field)]; }
  // The value of a field of kind text or JSON; empty where it is absent.
  [[nodiscard]] std::string_view text(ContextField field) const { return texts_[index(field)]; }

  void set_flag(ContextField field) { mask_ |= context_bit(field); }
  void set_number(ContextField field, std::uint64_t number) {
    mask_ |= context_bit(field);
    numbers_[index(field)] = number;
  }
  void set_text(ContextField field, std::string_view text) {
    mask_ |= context_bit(field);
    texts_[index(field)] = text;
  }

  // Empty without any field.
  [[nodiscard]] std::string encoded() const;

 private:
  static constexpr std::size_t index(ContextField field) { return static_cast<std::size_t>(field); }

  std::uint32_t mask_ = 0;
  std::array<std::uint64_t, kContextFields.size()> numbers_{};
  std::array<std::string_view, kContextFields.size()> texts_{};
};

}  // namespace gpubridge
