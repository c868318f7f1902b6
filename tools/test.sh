#!/usr/bin/env bash
# The whole test run behind `make test`. Every step runs, whatever became of the ones before it.
set -uo pipefail
cd "$(dirname "$0")/.."

jobs=$(nproc)
fuzz_seconds=${FUZZ_SECONDS:-10}
passed=0 failed=0 skipped=0
failed_steps=()

step() {  # step NAME COMMAND..
  local begin=$SECONDS
  printf '\n=== %s\n' "$1"
  "${@:2}" || failed_steps+=("$1")
  printf -- '--- %s: %d s\n' "$1" $((SECONDS - begin))
}

# A step without test cases of its own counts as one.
check() {  # check COMMAND..
  if "$@"; then
    ((++passed))
  else
    ((++failed))
    return 1
  fi
}

# The optimized builds take turns in one folder, and what they have in common is compiled once.
optimized=build/test
folder() {  # folder PRESET
  case $1 in
    release | cuda-*) echo "$optimized" ;;
    *) echo "build/$1" ;;
  esac
}

build() {  # build PRESET TARGET
  local log=build/$1-configure.log
  cmake --fresh --preset "$1" -B "$(folder "$1")" >"$log" 2>&1 || { cat "$log"; return 1; }
  cmake --build "$(folder "$1")" --target "$2" --parallel $((jobs + 1))  # one waits for the disk or a linker
}

# Adds up what the ctest report of a preset holds. GoogleTest programs leave one file each with their cases; any other
# test counts as one, and so does a program that died before it wrote its file.
count() {  # count RESULTS_DIR
  local results=$1 name status counts
  while read -r name status; do
    counts="0 0 0"
    if [[ -f $results/$name.xml ]]; then
      counts=$(awk '/<testsuite / {
          match($0, / tests="[0-9]+/);    tests += substr($0, RSTART + 8, RLENGTH - 8)
          match($0, / failures="[0-9]+/); failures += substr($0, RSTART + 11, RLENGTH - 11)
          match($0, / disabled="[0-9]+/); skipped += substr($0, RSTART + 11, RLENGTH - 11)
          match($0, / skipped="[0-9]+/);  skipped += substr($0, RSTART + 10, RLENGTH - 10)
        }
        END { print tests - failures - skipped, failures + 0, skipped + 0 }' "$results/$name.xml")
    elif [[ $status == run ]]; then
      counts="1 0 0"
    elif [[ $status == notrun || $status == disabled ]]; then
      counts="0 0 1"
    fi
    read -r p f s <<<"$counts"
    if [[ $status == fail && $f -eq 0 ]]; then f=1; fi
    ((passed += p, failed += f, skipped += s))
  done < <(sed -n 's/.*<testcase name="\([^"]*\)".* status="\([^"]*\)".*/\1 \2/p' "$results/ctest.xml")
}

# The tests of a preset's build, without the preset: its own folder, where there is one, would come before ours.
test_preset() {  # test_preset PRESET [GTEST_FILTER [CTEST ARGUMENTS..]]
  local results label=()
  case $1 in
    cuda-emulated) label=(--label-regex '^cuda$') ;;
    cuda-check) label=(--label-regex '^cuda_check$') ;;
  esac
  results=$PWD/$(folder "$1")/test-results
  rm -rf "$results"
  mkdir -p "$results"
  GTEST_FILTER="${2:-*}" ctest --test-dir "$(folder "$1")" --no-tests=error --output-on-failure --parallel "$jobs" \
    "${label[@]}" --output-junit "$results/ctest.xml" "${@:3}"
  local status=$?
  count "$results"
  return $status
}

build_and_test() {  # build_and_test PRESET TARGET, then as test_preset
  check build "$1" "$2" || return 1
  test_preset "$1" "${@:3}"
}

# All at once: their time is that of the clock.
fuzz() {
  local target log status=0
  local -A running
  for target in build/asan/bin/*_fuzz; do
    "$target" -max_total_time="$fuzz_seconds" -max_len=4096 -timeout=20 -print_final_stats=1 \
      -artifact_prefix=build/asan/ 2>"$target.log" &
    running[$target]=$!
  done
  for target in "${!running[@]}"; do
    log=$target.log
    check wait "${running[$target]}" || { status=1; tail -n 60 "$log"; }
    echo "${target##*/} $(grep -E '^stat::number_of_executed_units' "$log")"
  done
  return $status
}

# A step without its program counts as one that was skipped.
have() {  # have PROGRAM
  command -v "$1" >/dev/null && return
  echo "no $1 on this machine"
  ((++skipped))
  return 1
}

format() {
  have clang-format-14 || return 0
  check tools/format.sh --check
}

emulated_cuda() {
  have nvcc || return 0
  build_and_test cuda-emulated cuda_tests
}

# A kernel's register report is printed when it is compiled: always, as the emulator's build was here before.
cuda() {
  have nvcc || return 0
  check build cuda-check cuda_checks >build/cuda-check.log 2>&1 || { cat build/cuda-check.log; return 1; }
  check tools/spills.sh "$PWD/build/cuda-check.log" || return 1
  test_preset cuda-check
}

# The tests run on the wheel as users install it, but for its CUDA kernels: those of the preset cuda-check.
python_package() {
  local results=build/python-results.xml status counts
  check tools/python.sh lint || return 1
  SKBUILD_BUILD_DIR=$optimized check tools/python.sh wheel FASTWEIGHT_CUDA_ARCHITECTURES=90a-real CMAKE_CUDA_FLAGS=-Xptxas=-v || return 1
  check tools/python.sh smoke || return 1
  rm -f "$results"
  tools/python.sh test -n 2 --dist loadgroup --junitxml "$results"
  status=$?
  counts=$(sed -n 's/.*<testsuite .* errors="\([0-9]*\)" failures="\([0-9]*\)" skipped="\([0-9]*\)" tests="\([0-9]*\)".*/\1 \2 \3 \4/p' \
    "$results" 2>/dev/null)
  read -r e f s t <<<"${counts:-1 0 0 1}"
  ((passed += t - e - f - s, failed += e + f, skipped += s))
  return $status
}

mkdir -p build
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

begin=$SECONDS
tools/python.sh prepare >build/python-prepare.log 2>&1 &  # mostly downloads; its errors come again below
step "format" format
step "includes point one way" check tools/includes.sh
step "release build, all tests" build_and_test release all
step "CUDA kernels, emulated" emulated_cuda
step "CUDA, compiled for one architecture, tests without a device" cuda
wait
step "Python package: wheel and its tests" python_package
step "AddressSanitizer and UndefinedBehaviorSanitizer, all but slow tests" build_and_test asan all '-*Slow*'
step "fuzzing" fuzz
step "ThreadSanitizer, tests with threads" build_and_test tsan all '*Parallel*:*Thread*:*Concurrent*' -L unit

printf '\n=== %d s in all\n' $((SECONDS - begin))
for name in "${failed_steps[@]}"; do echo "FAILED: $name"; done
echo "$passed passed, $failed failed, $skipped skipped"
[[ ${#failed_steps[@]} -eq 0 ]]
