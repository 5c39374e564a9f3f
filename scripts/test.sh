#!/usr/bin/env bash
# test.sh VENV [pytest's own arguments]     all tests; what takes long is left to `make e2e` and `pytest -m long`.
# First what needs no vLLM, side by side in a few processes; then real vLLM, which wants the processors for itself.
set -uo pipefail
cd "$(dirname "$0")/.."

python=$1/bin/python
shift
status=0
ran=no

part() {
    "$python" -m pytest -m "not long" --durations=15 "$@"
    case $? in
        0) ran=yes ;;
        5) ;; # the arguments chose no test of this part
        *) ran=yes status=1 ;;
    esac
}

part tests/unit tests/contract tests/integration -n "${TEST_PROCESSES:-3}" --dist worksteal "$@"
part tests/e2e "$@"
[ $ran = yes ] || { echo "test.sh: no test was chosen by: $*" >&2; exit 5; }
exit $status
