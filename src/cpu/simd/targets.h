// Which instruction sets the kernels are compiled for. Included before any Highway header.
#pragma once

// On x86, AVX2, AVX-512 (AVX3) and Highway's portable fallback; the sets below and between them would only add
// to the build time. Scalable vectors cannot be held in arrays, which the register tiles need.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_RVV)
#endif
