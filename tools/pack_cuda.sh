#!/usr/bin/env bash
# Gathers what a machine with a CUDA device needs to run the tests and the tool of a build made elsewhere: stripped
# programs, and the libraries that it may not have. There: tools/test_cuda.sh OUTPUT_DIR
#   tools/pack_cuda.sh [BUILD_DIR [OUTPUT_DIR]]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/cuda} out=${2:-build/cuda-device}

rm -rf "$out"
mkdir -p "$out"/{tests,bin,lib}
cp "$build/tests/cuda_programs.txt" "$out/tests"
for name in $(cat "$build/tests/cuda_programs.txt"); do strip -o "$out/tests/$name" "$build/tests/$name"; done
strip -o "$out/bin/fastweight" "$build/bin/fastweight"
ldd "$out"/tests/*_test "$out/bin/fastweight" | awk '/libhwy/ { print $3 }' | sort -u | xargs cp -L -t "$out/lib"
du -sh "$out"
