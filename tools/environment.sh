# Sourced by run_train.sh and run_tests.sh, from the repository's folder.
# shellcheck shell=bash disable=SC2034
#
# `find_python requirements.txt ...` sets PYTHON to an interpreter that has the packages these files list:
#   1. the python3 (or python) of the active environment, if it has all of them and they are recent enough;
#   2. otherwise that of .venv in this folder, which is made first, or updated if the files have changed.
# INSTALL_FIRST, which CI sets, is a package that .venv gets before those files: a build of torch that pip would not choose.
# It never touches the active environment. A failure is one sentence and exit code 2.

find_python() {
    local candidate
    for candidate in python3 python; do
        PYTHON=$("$candidate" - "$@" 2>/dev/null <<<"$IS_COMPLETE") && return
    done
    is_made "$@" || make_venv "$@" || exit 2
    PYTHON=$PWD/.venv/bin/python
}

# Prints the interpreter's path if every `name==pin  # >= oldest` is installed at `oldest` or later (without a remark:
# at the pin's major version or later). Reads the packages' metadata only: importing torch would take seconds.
IS_COMPLETE='
import re, sys
from importlib.metadata import version
def numbers(text): return [int(part) for part in re.match(r"[\d.]*\d", text).group().split(".")]
for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        pin = re.match(r"([\w.-]+)==(\d+)(?:[^#]*# >= ([\d.]*\d))?", line)
        if pin and numbers(version(pin[1])) < numbers(pin[3] or pin[2]): sys.exit(1)
if sys.version_info < (3, 10): sys.exit(1)
print(sys.executable)
'

# .venv/made-from holds the checksums of the files that it was made from; it is written last.
is_made() {
    local changed
    [[ -f .venv/made-from ]] && changed=$(cksum "$@" | grep -vxFf .venv/made-from; true) && [[ ! $changed ]]
}

make_venv() (  # a subshell: when it ends, the lock is released
    exec 9<"$1"
    ! command -v flock >/dev/null || flock 9  # if two run at once, the second waits and then finds .venv made
    is_made "$@" && exit

    if ! .venv/bin/python -m pip --version &>/dev/null; then
        python=$(newest_python) ||
            fail "no Python 3.10 or later with the venv module was found (Debian, Ubuntu: apt install python3-venv)"
        "$python" -m venv --clear .venv || fail "$python -m venv .venv failed"
    fi
    log=$PWD/.venv/install.log
    say "installing ${*} into .venv ($(.venv/bin/python --version)); this happens once and takes a few minutes"
    if [[ ${INSTALL_FIRST-} ]] && ! .venv/bin/python -m pip install --no-input "$INSTALL_FIRST" </dev/null &>"$log"; then
        say "pip could not install $INSTALL_FIRST, so it chooses a build itself: $(grep -m1 '^ERROR' "$log" || tail -n1 "$log")"
    fi
    .venv/bin/python -m pip install --no-input "${@/#/--requirement=}" </dev/null &>"$log" ||
        fail "pip could not install ${*}: $(grep -m1 '^ERROR' "$log" || tail -n1 "$log") (its whole output: $log)"
    cksum "$@" >.venv/made-from
)

newest_python() {
    local candidate
    for candidate in python3.{14,13,12,11,10} python3; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

say() { echo "plumbline: $*" >&2; }

fail() {
    say "$@"
    exit 2
}
