#!/usr/bin/env bash
# Formats the C and C++ sources with clang-format 14; with --check, only reports what differs.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t files < <(git ls-files --cached --others --exclude-standard -- '*.c' '*.cc' '*.h' '*.cu' '*.cuh' |
  while read -r file; do [[ -f $file ]] && echo "$file"; done)
if [[ ${1:-} == --check ]]; then
  clang-format-14 --dry-run --Werror "${files[@]}"
else
  clang-format-14 -i "${files[@]}"
fi
