#!/usr/bin/env bash
# Gathers what a machine with a CUDA device needs to run the tests and the tool of a build made elsewhere: stripped
# programs, and the libraries that it may not have. There: tools/test_cuda.sh OUTPUT_DIR
#   tools/pack_cuda.sh [BUILD_DIR [OUTPUT_DIR]]
#
# OUTPUT_DIR.tar.xz has the same in a fiftieth of the bytes: with a dictionary that spans all programs, which are one library
# many times over. Who unpacks it needs 1 GB of memory.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/cuda} out=${2:-build/cuda-device}

rm -rf "$out" "$out.tar.xz"
mkdir -p "$out"/{tests,bin,lib}
cp "$build/tests/cuda_programs.txt" "$out/tests"
for name in $(cat "$build/tests/cuda_programs.txt"); do strip -o "$out/tests/$name" "$build/tests/$name"; done
strip -o "$out/bin/fastweight" "$build/bin/fastweight"
ldd "$out"/tests/*_test "$out/bin/fastweight" | awk '/libhwy/ { print $3 }' | sort -u | xargs cp -L -t "$out/lib"
tar c -C "$out" . | xz --threads=1 --lzma2=preset=1,dict=768MiB >"$out.tar.xz"
du -sh "$out" "$out.tar.xz"
