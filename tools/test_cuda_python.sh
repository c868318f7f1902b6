#!/usr/bin/env bash
# Runs the Python package of a wheel made elsewhere (tools/python.sh wheel) on this machine's first CUDA device, with the
# PyTorch that is installed: the tests that need a device, then the times beside flash-linear-attention.
#   tools/test_cuda_python.sh WHEEL [arguments of bench/compare_cuda.py]
set -uo pipefail
wheel=$(realpath "${1:?a wheel}")
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m zipfile -e "$wheel" "$folder"
export PYTHONPATH=$folder PYTHONDONTWRITEBYTECODE=1
python3 -c 'import fastweight, torch; print(torch.__version__, fastweight.info())' || exit 1
failed=0
python3 -m pytest -p no:cacheprovider -q -rs --durations=5 tests/python/test_cuda{,_large,_training}.py || failed=1
python3 bench/compare_cuda.py "${@:2}" || failed=1
exit $failed
