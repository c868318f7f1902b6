#!/usr/bin/env bash
# The Python package: tools/python.sh prepare | sdist | wheel [NAME=VALUE..] | lint | smoke | test [pytest arguments] |
# demo [arguments]. `prepare` installs what the others take, which they do by themselves.
# `wheel` builds a wheel with its libraries inside, CUDA kernels where there is an nvcc, and installs it into a fresh
# environment; it takes settings of CMake. `smoke` runs it there with no compiler in reach, `test` runs the tests on it;
# `demo` is `wheel` for the CPU and the example. Everything stays under build/.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=build/python-tools   # builds the wheel; holds PyTorch
fresh=build/python-fresh   # holds the wheel, and sees PyTorch
wheels=build/wheels

prepare() {
  if cmp -s tools/requirements.txt "$tools/requirements.txt"; then return; fi
  rm -rf "$tools"
  python3 -m venv "$tools"
  # Most of it is never imported: compiling it would take longer than the rest.
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --requirement tools/requirements.txt
  cp tools/requirements.txt "$tools/requirements.txt"
}

wheel() {
  prepare
  rm -rf "$wheels"/*.whl "$wheels/raw" "$fresh"
  PATH="$PWD/$tools/bin:$PATH"
  # The names that CMake finds by itself: ccache then knows what the other builds have compiled.
  CC=cc CXX=c++ python -m pip wheel . --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$wheels/raw" \
    --config-settings=cmake.define.FASTWEIGHT_WERROR=ON "${@/#/--config-settings=cmake.define.}"
  python -m auditwheel repair --exclude libtorch_cpu.so --wheel-dir "$wheels" "$wheels"/raw/*.whl
  ls -sh "$wheels"/fastweight-*-py3-none-manylinux*.whl

  python3 -m venv --without-pip "$fresh"
  local packages
  packages=$("$fresh/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/tools.pth"
  python -m pip --python "$fresh/bin/python" install --quiet --disable-pip-version-check --no-index --no-deps \
    --prefix "$fresh" "$wheels"/*.whl
}

sdist() {
  prepare
  mkdir -p "$wheels"
  "$tools/bin/python" -c 'import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))' "$wheels"
}

case ${1:-} in
  prepare) prepare ;;
  sdist) sdist ;;
  wheel) wheel "${@:2}" ;;
  lint)
    prepare
    "$tools/bin/ruff" format --check
    "$tools/bin/ruff" check
    ;;
  smoke) env -i PATH=/nonexistent HOME="$HOME" "$fresh/bin/python" tests/python/smoke.py ;;
  test) "$fresh/bin/python" -m pytest -p no:cacheprovider -q "${@:2}" tests/python ;;
  demo)
    wheel FASTWEIGHT_CUDA=OFF
    "$fresh/bin/python" tests/python/onednn.py \
      "$fresh/bin/python" examples/train_recall.py --output build/recall.png "${@:2}"
    ;;
  *)
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
    ;;
esac
