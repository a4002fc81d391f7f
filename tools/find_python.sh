#!/bin/sh
# Prints the Python interpreter that `make` builds .venv with, or says what was looked for and what to do.
#
#     tools/find_python.sh [INTERPRETER]
#
# INTERPRETER (make's PYTHON=) is taken or refused, never replaced by another one. Without it the first of these that
# is of the version in .python-version wins: one that pyenv installed, python3.12, python3 and python on PATH.
set -u
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
wanted=$(cat "$root/.python-version")

# Each candidate has to run: a pyenv shim exists for versions that are not active, and then fails.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

describe() {
    found=$(version_of "$1") || found=
    if [ -n "$found" ]; then
        echo "is Python $found"
    elif command -v "$1" >/dev/null 2>&1; then
        echo "does not run"
    else
        echo "not found"
    fi
}

accept() {
    # Debian splits ensurepip, which venv needs, off into a package of its own.
    if ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "error: $1 is Python $wanted but cannot make virtual environments: it has no module ensurepip." >&2
        echo "       Install it (Debian, Ubuntu: apt-get install python$wanted-venv), then run make again." >&2
        exit 1
    fi
    command -v "$1"
    exit 0
}

if [ -n "${1:-}" ]; then
    [ "$(version_of "$1")" = "$wanted" ] && accept "$1"
    echo "error: PYTHON=$1 $(describe "$1"); this project is tested with Python $wanted." >&2
    echo "       Give the path of a Python $wanted, or leave PYTHON= out to have one looked for." >&2
    exit 1
fi

pyenv="${PYENV_ROOT:-${HOME:-}/.pyenv}/versions"
set -- "$pyenv/$wanted"/bin/python "$pyenv/$wanted".*/bin/python "python$wanted" python3 python
for candidate in "$@"; do
    [ "$(version_of "$candidate")" = "$wanted" ] && accept "$candidate"
done

echo "error: no Python $wanted found. Looked for:" >&2
for candidate in "$@"; do
    echo "         $candidate: $(describe "$candidate")" >&2
done
echo "       Install it (pyenv install $wanted; Debian, Ubuntu: apt-get install python$wanted python$wanted-venv)" >&2
echo "       or run: make PYTHON=/path/to/python$wanted" >&2
exit 1
