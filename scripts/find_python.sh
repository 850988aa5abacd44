#!/bin/sh
# Prints the path of a Python that can run megatron_wd, or one line saying what to install (exit 2).
#
# Every candidate is run, because a name on PATH proves nothing: python3 may be older than 3.12, and
# a pyenv shim called python3.12 may refuse to start. A Python named in $PYTHON is the only candidate.
# Megatron Core has ready-made files for 3.12 and 3.13 on Linux; a newer Python would compile it
# with a C++ compiler, so those come last.
set -u

PROBE='
import sys
if sys.version_info < (3, 12) or sys.maxsize < 2**32:
    sys.exit(1)
import venv
if not sys.argv[1]:
    import ensurepip  # Debian ships it apart, as python3.12-venv; uv does without
print(0 if sys.version_info < (3, 14) else 1, sys.executable)
'

have_uv=$(command -v uv || true)
newer=""

try() {
    answer=$("$1" -I -c "$PROBE" "$have_uv" 2>/dev/null </dev/null) || return 1
    case $answer in
        "0 "?*) printf '%s\n' "${answer#0 }"; exit 0 ;;
        "1 "?*) [ -n "$newer" ] || newer=${answer#1 } ;;
    esac
}

accept_newer() {
    echo "note: no Python 3.12 or 3.13 found; with $newer Megatron Core is compiled during setup" >&2
    printf '%s\n' "$newer"
    exit 0
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    [ -z "$newer" ] || accept_newer
    echo "error: PYTHON=$PYTHON is not a 64-bit Python >= 3.12 with venv and pip that runs here; name another" >&2
    exit 2
fi

for name in python3 python python3.12 python3.13 python3.14 python3.15 python3.16; do
    try "$name"
done
for path in "${PYENV_ROOT:-${HOME:-/}/.pyenv}"/versions/3.1[2-9]*/bin/python3 \
    "${HOME:-/}"/.local/share/uv/python/cpython-3.1[2-9]*/bin/python3; do
    try "$path"
done
[ -z "$newer" ] || accept_newer

echo "error: no Python >= 3.12 found; install one (for instance: 'apt install python3.12 python3.12-venv'," \
    "'pyenv install 3.12' or 'uv python install 3.12'), or name it: make setup PYTHON=/path/to/python3.12" >&2
exit 2
