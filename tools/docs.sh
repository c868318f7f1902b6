#!/usr/bin/env bash
# The documentation site, into build/site; with `serve`, on a local port, made anew when a file changes.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=build/docs-tools
if ! cmp -s tools/docs-requirements.txt "$tools/requirements.txt"; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --requirement tools/docs-requirements.txt
  cp tools/docs-requirements.txt "$tools/requirements.txt"
fi
"$tools/bin/mkdocs" "${1:-build}"
