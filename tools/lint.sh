#!/bin/sh
# The linters, as CI runs them: Python style and types, layers of imports, C++ format.
#
#   tools/lint.sh          # reports
#   tools/lint.sh --fix    # mends what can be mended
set -eu
cd "$(dirname "$0")/.."

sources='pydist tests benchmarks examples'
native() { find csrc tests/native benchmarks/native -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh'; }

if [ "${1:-}" = --fix ]; then
  ruff check --fix $sources
  ruff format $sources
  native | xargs clang-format -i
  exit
fi

failed=0
run() {
  printf '== %s\n' "$1"
  "$@" || failed=1
}
run ruff check $sources
run ruff format --check $sources
run mypy
run lint-imports
printf '== clang-format\n'
native | xargs clang-format --dry-run --Werror || failed=1
if [ -f tools/check_layers.py ]; then
  run python tools/check_layers.py
fi
exit "$failed"
