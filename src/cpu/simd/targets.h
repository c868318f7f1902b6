// Which instruction sets the kernels are compiled for. Included before any Highway header.
#pragma once

// A list of what is wanted, so that a newer Highway adds nothing that the tests have not seen: on x86 AVX2 and AVX-512
// (AVX3), NEON, and the portable fallback. Other x86 sets would only add to the build time; SSE2, where Highway has it,
// would take the fallback's place, and loads infinities and NaNs of fp16 as numbers. Scalable vectors (SVE, RVV) cannot
// be held in arrays, which the register tiles need.
#define HWY_DISABLED_TARGETS (~(HWY_AVX2 | HWY_AVX3 | HWY_NEON | HWY_EMU128 | HWY_SCALAR))
