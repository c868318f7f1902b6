// Everything that is public.
#pragma once

#include "fastweight/blocks.h"
#include "fastweight/comba.h"
#include "fastweight/context.h"
#include "fastweight/delta_rule.h"
#include "fastweight/delta_rule_map.h"
#include "fastweight/dplr.h"
#include "fastweight/error.h"
#include "fastweight/gate.h"
#include "fastweight/gla.h"
#include "fastweight/info.h"
#include "fastweight/short_conv.h"
#include "fastweight/tensor.h"
#include "fastweight/ttt_linear.h"
