#!/usr/bin/env bash
# Runs a compiler, and fails where ptxas reports that it has given up something that the code for Hopper rests on:
# products of a warpgroup that run one after the other (C7510 and its neighbours), setmaxnreg without effect (C7507,
# C7508), registers that are spilled.
#   tools/strict_ptxas.sh COMPILER [ARGUMENTS..]
set -uo pipefail

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" 2> >(tee "$log" >&2)
status=$?
wait  # for tee
if [[ $status -ne 0 ]]; then exit "$status"; fi
if grep -E '\(C75(0[78]|1[0-9])\)|[Ss]etmaxnreg ignored|Registers are spilled' "$log" >/dev/null; then
  echo "$(basename "$0"): ptxas gave up what the code rests on, see above" >&2
  exit 1
fi
