#!/usr/bin/env bash
# Installs the build and test dependencies that are missing, on Debian 12, Ubuntu 24.04 and newer.
set -euo pipefail

# Looks for what each package is needed for, so that copies from elsewhere count too.
has_file() { compgen -G "$1" >/dev/null; }
has_program() { command -v "$1" >/dev/null; }
missing=()
need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }

need g++ has_program g++
need cmake has_program cmake
need ninja-build has_program ninja
need pkg-config has_program pkg-config
need libhwy-dev has_file '/usr*/include/hwy/highway.h'
need libgtest-dev has_file '/usr*/include/gtest/gtest.h'
need nlohmann-json3-dev has_file '/usr*/include/nlohmann/json.hpp'
need python3-venv python3 -c 'import ensurepip, venv'
need clang-14 has_program clang++-14
need libclang-rt-14-dev has_file '/usr/lib/llvm-14/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a'
need clang-format-14 has_program clang-format-14

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

echo "setup: installing ${missing[*]}"
quietly_with_retries apt-get update -qq || give_up "apt-get update failed"
quietly_with_retries apt-get install -y -qq --no-install-recommends "${missing[@]}" || give_up "apt-get install failed"
