// Flushing of denormal numbers while a kernel runs.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace fastweight::cpu {

// Decays run through the denormal range before they reach 0, and every multiply-add that meets a denormal number costs
// some 150 cycles on Intel's cores: with gates ten times as strong as usual the chunk form took thirteen times as long
// forward and thirty-five times as long backward. What is flushed is below 1.2e-38. Restores the caller's mode; the
// parallel loop's workers run in the mode of the thread that called it.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | 0x8040); }  // results to 0, operands as 0
  ~FlushDenormals() { _mm_setcsr(mode_); }
#elif defined(__aarch64__)
  FlushDenormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode_));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode_ | uint64_t{1} << 24));
  }
  ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(mode_)); }
#else
  FlushDenormals() = default;
  ~FlushDenormals() { (void)mode_; }
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__SSE__)
  unsigned int mode_;
#else
  uint64_t mode_ = 0;
#endif
};

}  // namespace fastweight::cpu
