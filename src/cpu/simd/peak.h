// The yardstick of the benches: how fast this machine can multiply and add, with nothing else in the way.
#pragma once

#include <cstdint>

namespace fastweight::cpu {

// Runs `rounds` rounds of independent fp32 multiply-adds on registers, with the vector width of the kernels, on the
// calling thread. Returns the FLOP done (a multiply-add counts 2).
double run_fma_rounds(int64_t rounds);

}  // namespace fastweight::cpu
