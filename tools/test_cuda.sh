#!/usr/bin/env bash
# Runs the tests of the CUDA backend on this machine's first device, with nothing but the build folder of the preset
# `cuda` or what tools/pack_cuda.sh made of it: the cases of the operators with their CUDA implementations, and what is
# special to the device.
#   tools/test_cuda.sh [BUILD_DIR] [GTEST_FLAGS..]
set -uo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build/cuda}")
export FASTWEIGHT_TEST_DEVICE=cuda FASTWEIGHT_GOLDEN_DIR=$PWD/tests/golden
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
failed=0 ran=0
for name in $(cat "$build/tests/cuda_programs.txt"); do
  printf '=== %s\n' "$name"
  "$build/tests/$name" --gtest_brief=1 "${@:2}" || failed=$((failed + 1))  # a program without a device fails here
  ran=$((ran + 1))
done
printf '\n%d programs, %d failed\n' "$ran" "$failed"
[[ $ran -gt 0 && $failed -eq 0 ]]
