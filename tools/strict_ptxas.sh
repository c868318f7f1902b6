#!/usr/bin/env bash
# Runs a compiler, and fails where ptxas reports that it has given up something that the code for Hopper rests on:
# products of a warpgroup that run one after the other or are waited for early (C7510 and its neighbours), setmaxnreg
# without effect (C7507, C7508), registers that are spilled.
#   tools/strict_ptxas.sh COMPILER [ARGUMENTS..]
set -uo pipefail

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" 2>"$log"
status=$?
cat "$log" >&2
if [[ $status -ne 0 ]] || ! grep -qE '\(C75(0[78]|1[0-9])\)|Registers are spilled' "$log"; then exit "$status"; fi
echo "${0##*/}: ptxas gave up what the code rests on, see above" >&2
while [[ $# -gt 1 ]]; do
  if [[ $1 == -o ]]; then rm -f "$2"; fi
  shift
done
exit 1
