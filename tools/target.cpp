#include "target.h"

#include <charconv>

namespace rewy::tool {

bool names_cuda(std::string_view text) {
  return text == "cuda" || text.starts_with("cuda:");
}

Device parse_device(std::string_view text) {
  if (!names_cuda(text)) return {};
  Device device{DeviceKind::kCuda, 0};
  if (text == "cuda") return device;
  const std::string_view index = text.substr(text.find(':') + 1);
  const auto [end, error] = std::from_chars(index.data(), index.data() + index.size(), device.index);
  if (error != std::errc{} || end != index.data() + index.size() || device.index < 0) {
    throw Error("device", "index", "cuda, or cuda:N with N from 0", "'" + std::string(text) + "'");
  }
  return device;
}

std::string device_text(const Device& device) {
  std::string text(name(device.kind));
  if (device.kind == DeviceKind::kCuda) text += ":" + std::to_string(device.index);
  return text;
}

Case for_device(Case c, const Device& device) {
  if (device.kind == DeviceKind::kCpu || c.schedule == Schedule::kTokens) return c;
  Problem& p = c.problem;
  if (p.dtype == DType::kF32) p.dtype = DType::kBF16;
  if (strength_of(p.op) == Strength::kIndependent) p.strength_dtype = p.dtype;
  if (c.strides == Placement::kPacked) c.strides = Placement::kAligned;
  return c;
}

Service service(const Case& c, const Device& device) {
  using Kind = Service::Kind;
  const Problem& p = c.problem;
  if (c.schedule == Schedule::kTokens && p.policy == Policy::kSave) return {Kind::kDeclined, "policy save"};
  if (c.schedule == Schedule::kTokens && p.variant != Variant{}) return {Kind::kDeclined, "a derivative graph"};
  if (device.kind == DeviceKind::kCpu) return {};
  if (c.schedule == Schedule::kTokens) {
    if (p.dtype == DType::kF64) return {Kind::kDeclined, "data of f64"};
    if (p.K > 256) return {Kind::kDeclined, "K above 256"};
    return {};
  }
  const auto width = [](std::int64_t x) { return x % 8 == 0 && x <= 256; };
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return {Kind::kDeclined, "data that are neither bf16 nor f16"};
  if (!width(p.K) || !width(p.V)) return {Kind::kDeclined, "a width above 256 or no multiple of 8"};
  if (p.variant != Variant{}) return {Kind::kDeclined, "a derivative graph other than the default"};
  if (c.strides == Placement::kOdd) return {Kind::kMayDecline, "a last axis that is not contiguous"};
  return {};
}

}  // namespace rewy::tool
