#!/usr/bin/env bash
# The whole test run behind `make test`. Every step runs, whatever became of the ones before it.
set -uo pipefail
cd "$(dirname "$0")/.."

jobs=$(nproc)
fuzz_seconds=${FUZZ_SECONDS:-20}
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

build() {  # build PRESET
  cmake --preset "$1" >"build/$1-configure.log" 2>&1 || { cat "build/$1-configure.log"; return 1; }
  cmake --build --preset "$1" --parallel "$jobs"
}

# Adds up what the ctest report of a preset holds. GoogleTest programs leave one file each with their cases; any other
# test counts as one, and so does a program that died before it wrote its file.
count() {  # count PRESET
  local results="build/$1/test-results" name status counts
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

test_preset() {  # test_preset PRESET [GTEST_FILTER [CTEST ARGUMENTS..]]
  local preset=$1 results="build/$1/test-results"
  rm -rf "$results"
  mkdir -p "$results"
  GTEST_FILTER="${2:-*}" ctest --preset "$preset" --parallel "$jobs" --output-junit "$PWD/$results/ctest.xml" "${@:3}"
  local status=$?
  count "$preset"
  return $status
}

build_and_test() {  # as test_preset
  check build "$1" || return 1
  test_preset "$@"
}

fuzz() {
  check build fuzz || return 1
  local target
  for target in build/fuzz/bin/*_fuzz; do
    check "$target" -max_total_time="$fuzz_seconds" -max_len=4096 -timeout=20 -print_final_stats=1 \
      -artifact_prefix=build/fuzz/ 2>build/fuzz/fuzz.log || { tail -n 60 build/fuzz/fuzz.log; return 1; }
    grep -E '^stat::number_of_executed_units' build/fuzz/fuzz.log
  done
}

# The register report of a kernel is printed when it is compiled; ccache repeats it.
cuda() {
  if ! command -v nvcc >/dev/null; then
    echo "no nvcc on this machine"
    ((++skipped))
    return 0
  fi
  find build/cuda-check -name '*.cu.o' -delete 2>/dev/null
  check build cuda-check >build/cuda-check.log 2>&1 || { cat build/cuda-check.log; return 1; }
  check tools/spills.sh "$PWD/build/cuda-check.log" || return 1
  test_preset cuda-check
}

emulated_cuda() {
  if ! command -v nvcc >/dev/null; then
    echo "no CUDA headers on this machine"
    ((++skipped))
    return 0
  fi
  build_and_test cuda-emulated
}

# The tests run on the wheel as users install it, but for its CUDA kernels: those of the preset cuda-check, which ccache
# has seen.
python_package() {
  local results=build/python-results.xml status counts
  check tools/python.sh lint || return 1
  check tools/python.sh wheel FASTWEIGHT_CUDA_ARCHITECTURES=90a-real CMAKE_CUDA_FLAGS=-Xptxas=-v || return 1
  check tools/python.sh smoke || return 1
  rm -f "$results"
  tools/python.sh test --junitxml "$results"
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
step "format" check tools/format.sh --check
step "release build, all tests" build_and_test release
step "CUDA, compiled for one architecture, tests without a device" cuda
step "CUDA kernels, emulated" emulated_cuda
step "AddressSanitizer and UndefinedBehaviorSanitizer, all but slow tests" build_and_test asan '-*Slow*' -LE install
step "ThreadSanitizer, tests with threads" build_and_test tsan '*Parallel*:*Thread*:*Concurrent*' -L unit
step "fuzzing, built with clang" fuzz
step "Python package: wheel and its tests" python_package

printf '\n=== %d s in all\n' $((SECONDS - begin))
for name in "${failed_steps[@]}"; do echo "FAILED: $name"; done
echo "$passed passed, $failed failed, $skipped skipped"
[[ ${#failed_steps[@]} -eq 0 ]]
