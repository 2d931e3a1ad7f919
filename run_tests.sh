#!/usr/bin/env bash
# The tests:  ./run_tests.sh [arguments of pytest ...]      for example  -k resume  or  -m slow
#
# In the active environment if it has what is needed, otherwise in .venv, which is made. Without -m the tests marked
# slow, torture and exhaustive are left out (pyproject.toml). Tests see no GPU, but those of `-m gpu`.
#
# The whole suite, or all tests of a marker, run in several processes: one per processor, and two more (of a marker four),
# because some tests wait. It ends with a table: the processor seconds of each file and of the costliest tests. Anything
# narrower (a file, -k) runs in one process; -n 3 asks for three.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source tools/environment.sh

find_python requirements.txt requirements-test.txt
unset PYTHONDONTWRITEBYTECODE # tests start hundreds of processes, and each would compile this repository anew: 1.4 s
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # no spinning: tests run many processes
if [[ $# == 0 || ($# == 2 && $1 == -m) ]]; then
    processors=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
    workers=$((processors + ($# ? 4 : 2)))
    set -- -n $((workers < 8 ? workers : 8)) "$@"
fi
exec "$PYTHON" -m pytest "$@"
