#!/bin/sh
# Runs the linters, as CI does: Python style and types, layers of imports, C++ format, shell, and a
# build of the documentation without warnings.
#
#   tools/lint.sh          # reports
#   tools/lint.sh --fix    # fixes what can be fixed
set -eu
cd "$(dirname "$0")/.."

fix=${1:-}
set -- pydist tests benchmarks examples tools # with Python
native() {
  find csrc tests/native tests/simulated benchmarks/native -name '*.[ch]pp' -o -name '*.h' \
    -o -name '*.cu' -o -name '*.cuh'
}
shell() { grep -lrE '^#!.*\b(ba)?sh$' tools; }

if [ "$fix" = --fix ]; then
  ruff check --fix "$@"
  ruff format "$@"
  native | xargs clang-format -i
  exit
fi

failed=0
run() {
  printf '== %s\n' "$1"
  "$@" || failed=1
}
# Types take as long as all else, on one core.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
mypy pydist tools/*.py benchmarks/python tests/lib >"$types" 2>&1 &
mypy=$!

run ruff check "$@"
run ruff format --check "$@"
run lint-imports
run python tools/check_reach.py
printf '== clang-format\n'
native | xargs clang-format --dry-run --Werror || failed=1
printf '== shellcheck\n'
shell | xargs shellcheck || failed=1
if [ -f tools/check_layers.py ]; then
  run python tools/check_layers.py
fi
printf '== documentation\n'
# Not --quiet, which would hide warnings from --strict as well.
pages="$(NO_MKDOCS_2_WARNING=1 mkdocs build --strict 2>&1)" || failed=1
printf '%s\n' "$pages" | grep -v '^INFO' || true
printf '== mypy\n'
wait "$mypy" || failed=1
cat "$types"
exit "$failed"
