#!/usr/bin/env bash
# Runs the tests of the CUDA backend on this machine's first device, with nothing but the build folder of the preset
# `cuda` or what tools/pack_cuda.sh made of it: the cases of the operators with their CUDA implementations, and what is
# special to the device.
#   [JOBS=N] tools/test_cuda.sh [BUILD_DIR] [GTEST_FLAGS..]
#
# Most of the time goes into the reference on the CPU: with JOBS programs at once it is as much shorter.
set -uo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build/cuda}")
flags=("${@:2}")
export FASTWEIGHT_TEST_DEVICE=cuda FASTWEIGHT_GOLDEN_DIR=$PWD/tests/golden
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
mapfile -t programs <"$build/tests/cuda_programs.txt"
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

run() {  # run PROGRAM; its output at once, when it has ended
  local begin=$SECONDS
  "$build/tests/$1" --gtest_brief=1 "${flags[@]}" >"$results/$1.log" 2>&1 || touch "$results/$1.failed"
  printf '=== %s\n%s\n--- %s: %d s\n' "$1" "$(<"$results/$1.log")" "$1" $((SECONDS - begin))
}

for name in "${programs[@]}"; do
  while (($(jobs -rp | wc -l) >= ${JOBS:-1})); do wait -n; done
  run "$name" &  # a program without a device fails
done
wait
failed=$(find "$results" -name '*.failed' | wc -l)
printf '\n%d programs, %d failed\n' "${#programs[@]}" "$failed"
[[ ${#programs[@]} -gt 0 && $failed -eq 0 ]]
