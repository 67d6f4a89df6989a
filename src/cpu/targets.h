// The instruction sets that per-target sources are compiled for; include before <hwy/foreach_target.h>.
//
// x86-64: AVX-512, AVX2, and SSSE3 for what is older (the build sets -mssse3; SSE4 adds nothing here). Arm: NEON. SVE's
// vectors have no size at compile time and cannot make up the register tile of gemm-inl.h.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
