#!/usr/bin/env bash
# Includes point one way: reports every include against the layers, of which docs/architecture.md has the picture.
set -euo pipefail
cd "$(dirname "$0")/.."

# What a file may include, as a pattern. Backends show `ops` their registries; a family does not know another one.
allowed() {  # allowed FILE
  local public='fastweight/|core/' family
  family=$(cut -d/ -f3 <<<"$1")
  case $1 in
    include/fastweight/*) echo 'fastweight/' ;;
    src/core/*) echo "$public" ;;
    src/cpu/simd/*) echo "$public|hwy/|cpu/simd/|cpu/scalar_types\.h\"" ;;
    src/cpu/*/*) echo "$public|hwy/|cpu/simd/|cpu/[^/]*\"|cpu/$family/" ;;
    src/cpu/*) echo "$public|hwy/|cpu/simd/|cpu/[^/]*\"" ;;
    src/cuda/common/*) echo "$public|cuda/common/" ;;
    src/cuda/sm90/*) echo "$public|cuda/common/|cuda/sm90/" ;;
    src/cuda/*/*) echo "$public|cuda/common/|cuda/sm90/|cuda/[^/]*\"|cuda/$family/" ;;
    src/cuda/*) echo "$public|cuda/common/|cuda/[^/]*\"|cuda/[^/]*/registry\.h\"" ;;
    src/ops/*) echo "$public|ops/|(cpu|cuda)/[^/]*/registry\.h\"|cuda/backend\.h\"|cpu/parallel\.h\"|(cpu/simd|hwy)/targets\.h\"" ;;
    src/capi/*) echo "$public|capi/" ;;
    python/bindings/*) echo "$public|(convert|observe)\.h\"" ;;
    *) echo 'nothing: its folder is not in tools/includes.sh' ;;
  esac
}

status=0
while read -r file; do
  pattern=$(allowed "$file")
  if grep -nE '^ *#include "' "$file" | grep -vE "\"($pattern)" | sed "s|^|$file:|"; then
    echo "$file: expected includes of $pattern"
    status=1
  fi
done < <(find include src python/bindings -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
exit $status
