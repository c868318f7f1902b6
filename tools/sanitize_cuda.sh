#!/usr/bin/env bash
# Runs tests of the CUDA backend on this machine's first device under the four tools of compute-sanitizer, with a build
# folder as in tools/test_cuda.sh: programs whose cases between them launch every kernel, each with few cases.
#   tools/sanitize_cuda.sh [BUILD_DIR [PROGRAM..]]
#
# racecheck is asked first about cuda_warp_roles_test, whose kernels have no race: a kind of barrier that it does not
# follow there it follows nowhere, and what it reports of kernels that keep their order by such barriers counts apart.
set -uo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build/cuda}")
programs=("${@:2}")
if [[ ${#programs[@]} -eq 0 ]]; then
  mapfile -t programs < <(grep -E '^(cuda|sm90)_|_golden_test$|_map_test$' "$build/tests/cuda_programs.txt")
fi
export FASTWEIGHT_TEST_DEVICE=cuda FASTWEIGHT_TEST_REDUCED=1 FASTWEIGHT_GOLDEN_DIR=$PWD/tests/golden
export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
readonly found=99  # the exit code of a run whose only errors are the tool's

# TOOL PROGRAM
sanitize() {
  compute-sanitizer --tool "$1" --error-exitcode $found --print-limit 0 "$build/tests/$2" --gtest_brief=1 2>&1
}

# The kernels that racecheck names in a log, and how often.
kernels() {
  grep -oE 'Race reported .* access at .*_kernel' "$1" | sed -E 's/.* access at (void )?//' | sort | uniq -c
}

# Whether races of kernels that were expected are all that went wrong.
was_expected() {
  local names others
  names=$(kernels "$log")
  others=$(grep '^=====' "$log" | grep -vE '^=+ *(COMPUTE-SANITIZER|\w+: Race reported .*|and .*|RACECHECK .*)?$')
  [[ -n $names && -z $(grep -vE "$expected" <<<"$names") && -z $others ]] && ! grep -q FAILED "$log"
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
expected='::(hand_over|meet_apart)_kernel$'
if [[ -x $build/tests/cuda_warp_roles_test ]]; then
  compute-sanitizer --version | tail -1
  sanitize racecheck cuda_warp_roles_test >"$log"
  if ! grep -q 'RACECHECK SUMMARY' "$log"; then
    cat "$log"
    exit 1
  fi
  if [[ $(kernels "$log") == *hand_over_kernel* ]]; then
    echo 'racecheck does not follow barriers at which one side only arrives'
    expected+='|::chunk_16bit::.*::scan(_back)?_kernel$|::chunk_sm90::.*_kernel$'
    expected+='|::ttt::.*::(chain|solo_chain|keep_states|reverse|reverse_solo)_kernel$'
  else
    echo 'racecheck follows barriers at which one side only arrives'
  fi
  if [[ $(kernels "$log") == *meet_apart_kernel* ]]; then
    echo 'racecheck does not follow barriers of a block after barriers of a part of it'
    expected+='|::chunk_16bit::.*::gradients_kernel$|::ttt::.*::reverse(_solo)?_kernel$|::chunk_sm90::.*_kernel$'
  else
    echo 'racecheck follows barriers of a block after barriers of a part of it'
  fi
  printf 'counted apart: kernels like %s\n\n' "$expected"
fi

failed=0 apart=0
for name in "${programs[@]}"; do
  for tool in memcheck racecheck initcheck synccheck; do
    printf '=== %s: %s\n' "$tool" "$name"
    sanitize "$tool" "$name" >"$log"
    code=$?
    if [[ $tool == racecheck && $code -eq $found ]] && was_expected; then
      kernels "$log"
      tail -1 "$log"
      apart=$((apart + 1))
    else
      cat "$log"
      [[ $code -eq 0 ]] || failed=$((failed + 1))
    fi
  done
done
printf '\n%d programs, %d runs failed' "${#programs[@]}" "$failed"
[[ $apart -eq 0 ]] || printf ', %d with reports that racecheck was expected to make' "$apart"
echo
[[ ${#programs[@]} -gt 0 && $failed -eq 0 ]]
