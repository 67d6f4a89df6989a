// Devices as --device names them, and what becomes of a case on a GPU, which serves fewer types and widths than the
// CPU.
#pragma once

#include <string>
#include <string_view>

#include "case.h"
#include "rewy/types.h"

namespace rewy::tool {

/// Whether a text names a GPU: "cuda", or "cuda:" and an index.
bool names_cuda(std::string_view text);
/// The device of "cuda" or "cuda:1"; every other word is the CPU's. Throws rewy::Error for an index that is none.
Device parse_device(std::string_view text);
std::string device_text(const Device&);  ///< "cpu", "cuda:0"

/// The case as a device can serve it. A GPU multiplies 16-bit numbers: FP32 data become BF16, and GDN2's strengths,
/// which meet the data inside products, take the data's type; rows cut out of a projection are cut at 16 bytes, which a
/// GPU copies at a time. Idempotent; nothing changes on the CPU, nor token by token, where a GPU computes in FP32.
Case for_device(Case, const Device&);

/// What is documented of a device and a problem.
struct Service {
  enum class Kind : std::uint8_t {
    kServed,      ///< refusing it is a fault
    kMayDecline,  ///< honoured or refused, never misread
    kDeclined     ///< computing it is a fault: it must be refused
  };
  Kind kind = Kind::kServed;
  std::string reason;  ///< empty if served
};
Service service(const Case&, const Device&);

}  // namespace rewy::tool
