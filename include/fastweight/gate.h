// The decay of the state: S is multiplied by exp(g) before a token writes to it.
#pragma once

#include <cstdint>

namespace fastweight {

enum class Gate : int32_t {
  kNone = 0,        // no decay: DeltaNet, linear attention, IPLR
  kPerHead = 1,     // g is [B, T, HV]: GDN, simple GLA, Comba
  kPerChannel = 2,  // g is [B, T, HV, K]: KDA, GLA, DPLR
};

}  // namespace fastweight
