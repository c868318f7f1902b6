#!/usr/bin/env bash
# Installs a build to a scratch prefix, moves it, and builds and runs programs against it: through find_package, and
# through pkg-config in C++ and C.
# The installed tool checks itself.
#   run.sh CMAKE BUILD_DIR CC CXX
set -euo pipefail
cmake=$1 build=$2 cc=$3 cxx=$4
here=$(cd "$(dirname "$0")" && pwd)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$cmake" --install "$build" --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/prefix"
prefix=$scratch/prefix

"$cmake" -S "$here" -B "$scratch/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$cxx" >/dev/null
"$cmake" --build "$scratch/build" >/dev/null
"$scratch/build/outside_cmake"

pc_dir=$(dirname "$(find "$prefix" -name fastweight.pc)")
export PKG_CONFIG_PATH=$pc_dir LD_LIBRARY_PATH=$(dirname "$pc_dir")
read -ra flags <<<"$(pkg-config --cflags fastweight)"
read -ra libs <<<"$(pkg-config --libs fastweight)"
"$cxx" -std=c++20 "${flags[@]}" "$here/outside.cc" -o "$scratch/outside_pc" "${libs[@]}"
"$scratch/outside_pc"
for source in "$here"/*.c; do
  "$cc" -std=c99 "${flags[@]}" "$source" -o "$scratch/outside_c" "${libs[@]}"
  "$scratch/outside_c"
done

if [[ -x $prefix/bin/fastweight ]]; then
  LC_ALL=C "$prefix/bin/fastweight" check
fi
