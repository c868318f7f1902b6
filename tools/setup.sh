#!/usr/bin/env bash
# Installs the packages that are missing, on Debian 12, Ubuntu 24.04 and newer.
#   tools/setup.sh build    the library and the tool
#   tools/setup.sh demo     the same and the Python package
#   tools/setup.sh test     the same and all tests
set -euo pipefail

# Looks for what each package is needed for, so that copies from elsewhere count too.
has_file() { compgen -G "$1" >/dev/null; }
has_program() { command -v "$1" >/dev/null; }
missing=()
need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }

for_build() {
  need g++ has_program g++
  need cmake has_program cmake
  need ninja-build has_program ninja
  need libhwy-dev has_file '/usr*/include/hwy/highway.h'
  need nlohmann-json3-dev has_file '/usr*/include/nlohmann/json.hpp'
}

for_demo() {
  for_build
  need python3-venv python3 -c 'import ensurepip, venv'
}

for_test() {
  for_demo
  need pkg-config has_program pkg-config
  need libgtest-dev has_file '/usr*/include/gtest/gtest.h'
  # PyTorch's compiler, which some of the Python tests use, includes Python.h.
  need python3-dev python3 -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")'
  need clang has_program clang++
  need libclang-rt-dev has_fuzzer
  need clang-format-14 has_formatter
}
has_fuzzer() { has_file "$(clang++ -print-resource-dir)/lib/linux/libclang_rt.fuzzer-*.a"; }
# Other versions lay out differently: where the system has no 14, the format check is skipped.
has_formatter() { has_program clang-format-14 || ! apt-cache show clang-format-14; }

case ${1:-} in
  build | demo | test) "for_$1" ;;
  *)
    sed -n '3,5s/^# *//p' "$0" >&2
    exit 2
    ;;
esac

if [[ ${#missing[@]} -eq 0 ]]; then exit 0; fi

give_up() {
  echo "setup: $1" >&2
  echo "setup: install these packages (Debian and Ubuntu names), then try again: ${missing[*]}" >&2
  exit 1
}

has_program apt-get || give_up "there is no apt-get on this machine"
as_root=()
if [[ $(id -u) -ne 0 ]]; then
  has_program sudo || give_up "not root, and there is no sudo"
  as_root=(sudo)
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
quietly_with_retries() {
  local attempt
  for attempt in 1 2 3; do
    if "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1; then return 0; fi
    sleep $((attempt * 3))
  done
  tail -n 20 "$log" >&2
  return 1
}

quietly_with_retries apt-get update -qq || give_up "apt-get update failed"
missing=()
"for_$1"  # again: apt now knows what the system has
echo "setup: installing ${missing[*]}"
quietly_with_retries apt-get install -y -qq --no-install-recommends "${missing[@]}" || give_up "apt-get install failed"
