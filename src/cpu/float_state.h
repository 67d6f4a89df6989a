// The floating-point state of a thread that computes.
#pragma once

#include <hwy/base.h>

#if HWY_ARCH_X86
#include <xmmintrin.h>
#endif

namespace rewy::cpu {

/// Whether numbers under the normal range stay or are taken as 0. They cost a hundred cycles each on some processors,
/// and the decays of a recurrence reach them all the time.
enum class Subnormals { kKeep, kFlush };

/// While it lives, results are rounded to nearest and nothing traps, whatever the caller's state is: with a rounding
/// mode of its own, the caller's thread would differ from the others.
class FloatState {
 public:
#if HWY_ARCH_X86
  explicit FloatState(Subnormals s) : saved_(_mm_getcsr()) {
    _mm_setcsr(s == Subnormals::kFlush ? 0x9fc0u : 0x1f80u);
  }
  ~FloatState() {
    _mm_setcsr(saved_);
  }

 private:
  unsigned saved_;
#elif HWY_ARCH_ARM_A64
  explicit FloatState(Subnormals s) {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(s == Subnormals::kFlush ? 1ull << 24 : 0ull));
  }
  ~FloatState() {
    asm volatile("msr fpcr, %0" : : "r"(saved_));
  }

 private:
  unsigned long long saved_;
#else
  explicit FloatState(Subnormals) {}
  ~FloatState() {}
#endif
 public:
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;
};

}  // namespace rewy::cpu
