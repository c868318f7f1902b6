#!/usr/bin/env bash
# Reads the register report of a CUDA build (preset cuda-check) and fails where a kernel spills more bytes than
# tools/spills.txt allows it. Lines of that file: the kernel's name within fastweight::cuda, then the bytes.
#   tools/spills.sh BUILD_LOG
set -euo pipefail
cd "$(dirname "$0")"

awk '/Compiling entry function/ { name = $0; sub(/.*function \x27/, "", name); sub(/\x27.*/, "", name) }
     /bytes spill stores/ {
       stores = $0; sub(/ bytes spill stores.*/, "", stores); sub(/.* /, "", stores)
       loads = $0;  sub(/ bytes spill loads.*/, "", loads);   sub(/.* /, "", loads)
       print name, stores + loads
     }' "$1" | c++filt |
  sed -E 's/^void //; s/\(anonymous namespace\):://g; s/\(fastweight::DType\)//g; s/\(.*\) ([0-9]+)$/ \1/; s/^fastweight::cuda:://' |
  sort -u | awk -v allowed=spills.txt '
    BEGIN {
      while ((getline line < allowed) > 0) {
        if (line ~ /^(#|$)/) continue
        bytes = line; sub(/.* /, "", bytes); sub(/ [0-9]+$/, "", line); most[line] = bytes
      }
    }
    {
      bytes = $NF; sub(/ [0-9]+$/, ""); ++kernels
      if (bytes + 0 > most[$0] + 0) { printf "%s spills %d bytes, allowed %d\n", $0, bytes, most[$0]; ++failed }
    }
    END {
      if (kernels == 0) { print "the log has no register report"; exit 1 }
      printf "%d kernels, %d spill more than tools/spills.txt allows\n", kernels, failed
      exit failed > 0
    }'
