#!/usr/bin/env bash
# Context parallelism on this machine's first CUDA device, with the PyTorch that is installed and the package of a wheel
# made elsewhere (tools/python.sh wheel): several ranks share the device and talk over gloo. The tests, then times.
#   tools/test_cuda_context_parallel.sh WHEEL [arguments of bench/context_parallel.py]
set -uo pipefail
wheel=$(realpath "${1:?a wheel}")
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m zipfile -e "$wheel" "$folder"
export PYTHONPATH=$folder PYTHONDONTWRITEBYTECODE=1
failed=0
python3 -m pytest -p no:cacheprovider -q -rs -k on_cuda tests/python/test_context_parallel.py || failed=1
for rule in gdn kda; do
  python3 bench/context_parallel.py --cuda --ranks 2 4 --rule "$rule" "${@:2}" || failed=1
done
exit $failed
