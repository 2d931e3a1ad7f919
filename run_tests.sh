#!/usr/bin/env bash
# The tests:  ./run_tests.sh [arguments of pytest ...]      for example  -k resume  or  -m slow
#
# In the active environment if it has what is needed, otherwise in .venv, which is made. Without -m the tests marked
# slow and torture are left out (pyproject.toml).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source tools/environment.sh

find_python requirements.txt requirements-test.txt
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # no spinning: tests run many processes
exec "$PYTHON" -m pytest "$@"
