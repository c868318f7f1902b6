#!/usr/bin/env bash
# Gathers what a machine with a CUDA device needs to run the tests and the tool of a build made elsewhere: stripped
# programs, and the libraries that it may not have. There: tools/test_cuda.sh OUTPUT_DIR
#   tools/pack_cuda.sh [BUILD_DIR [OUTPUT_DIR]]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/cuda} out=${2:-build/cuda-device}

rm -rf "$out"
mkdir -p "$out"/{tests,bin,lib}
for program in "$build"/tests/cuda_*_test "$build"/tests/delta_rule_{forward,step,contract,golden,random}_test \
  "$build"/tests/{short_conv_operator,blocks_results,blocks_identities}_test; do
  strip -o "$out/tests/$(basename "$program")" "$program"
done
strip -o "$out/bin/fastweight" "$build/bin/fastweight"
ldd "$out"/tests/* "$out/bin/fastweight" | awk '/libhwy/ { print $3 }' | sort -u | xargs cp -L -t "$out/lib"
du -sh "$out"
