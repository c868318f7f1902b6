#!/usr/bin/env bash
# Formats the C and C++ sources with clang-format 14; with --check, only reports what differs.
set -euo pipefail
cd "$(dirname "$0")/.."

# In a clone what git knows or does not ignore; elsewhere, or without git, what is there.
sources() {
  if [[ $(git rev-parse --show-toplevel 2>/dev/null) == "$(pwd -P)" ]]; then
    git ls-files --cached --others --exclude-standard -- '*.c' '*.cc' '*.h' '*.cu' '*.cuh' |
      while read -r file; do if [[ -f $file ]]; then echo "$file"; fi; done
  else
    find . -name '.?*' -prune -o -path ./build -prune -o \
      -type f -regex '.*\.\(c\|cc\|h\|cu\|cuh\)' -print
  fi
}

found=$(sources)
if [[ -z $found ]]; then
  echo "format: there are no sources in $PWD" >&2
  exit 1
fi
mapfile -t files <<<"$found"
if [[ ${1:-} == --check ]]; then
  clang-format-14 --dry-run --Werror "${files[@]}"
else
  clang-format-14 -i "${files[@]}"
fi
