#!/usr/bin/env bash
# Runs tests of the CUDA backend on this machine's first device under the four tools of compute-sanitizer, with a build
# folder as in tools/test_cuda.sh: programs whose cases between them launch every kernel, each with few cases.
#   tools/sanitize_cuda.sh [BUILD_DIR [PROGRAM..]]
set -uo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build/cuda}")
programs=("${@:2}")
if [[ ${#programs[@]} -eq 0 ]]; then
  mapfile -t programs < <(grep -E '^(cuda|sm90)_|_golden_test$|_map_test$' "$build/tests/cuda_programs.txt")
fi
export FASTWEIGHT_TEST_DEVICE=cuda FASTWEIGHT_TEST_REDUCED=1 FASTWEIGHT_GOLDEN_DIR=$PWD/tests/golden
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
failed=0
for name in "${programs[@]}"; do
  for tool in memcheck racecheck initcheck synccheck; do
    printf '=== %s: %s\n' "$tool" "$name"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/tests/$name" --gtest_brief=1 || failed=$((failed + 1))
  done
done
printf '\n%d programs, %d runs failed\n' "${#programs[@]}" "$failed"
[[ ${#programs[@]} -gt 0 && $failed -eq 0 ]]
