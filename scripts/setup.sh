#!/bin/sh
# Makes .venv with exactly what requirements.lock names, and this checkout installed into it.
#
# Safe to run at any time and after any interruption: the stamp is written last, an environment
# without one is built again, and one whose lock has changed is brought up to date in place.
# uv does the installing because it takes a quarter of pip's time. Where it is not on PATH, the
# lock's own uv is put into .venv first; where that fails too, pip does the work.
set -eu
cd "$(dirname "$0")/.."

ROOT=$(pwd -P)
VENV=.venv
PY=$VENV/bin/python
STAMP=$VENV/.setup_complete
LOCK=requirements.lock
BUSY=.venv.busy
NEEDED_GB=8

say() { echo "setup: $*"; }
fail() { echo "error: $*" >&2; exit 2; }

# What the environment was made from. The path counts, because a moved .venv has broken scripts.
fingerprint() {
    "$PY" -I -c '
import hashlib, sys
digest = hashlib.sha256()
for path in sys.argv[2:]:
    digest.update(open(path, "rb").read())
print(sys.version.split()[0], digest.hexdigest(), sys.argv[1])' "$ROOT" "$LOCK" pyproject.toml 2>/dev/null
}

is_ready() { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ] && wanted_python; }

# False when the user names another Python than the one .venv was made with.
wanted_python() {
    [ -z "${PYTHON:-}" ] && return 0
    show='import sys; print(sys.version_info[:3])'
    [ "$("$PYTHON" -I -c "$show" 2>/dev/null)" = "$("$PY" -I -c "$show" 2>/dev/null)" ]
}

# Only the lock or pyproject.toml has changed: same Python, same place.
is_updatable() {
    [ -f "$STAMP" ] && wanted_python || return 1
    now=$(fingerprint) || return 1
    read -r old_version _ old_root <"$STAMP"
    [ "$old_version $old_root" = "${now%% *} $ROOT" ]
}

# Two setups at once (say, `make test` and `make quickstart`) would build into the same folder.
take_turn() {
    until mkdir "$BUSY" 2>/dev/null; do
        holder=$(cat "$BUSY/pid" 2>/dev/null || true)
        if [ -z "$holder" ]; then
            sleep 1
            holder=$(cat "$BUSY/pid" 2>/dev/null || true)
        fi
        if [ -n "$holder" ] && kill -0 "$holder" 2>/dev/null; then
            [ -n "${waiting:-}" ] || say "waiting for the setup that runs already (process $holder)"
            waiting=yes
            sleep 1
        else
            rm -rf "$BUSY"
        fi
    done
    echo $$ >"$BUSY/pid"
    trap 'rm -rf "$BUSY"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

warn_if_disk_is_short() {
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    if [ "$free_kb" -lt $((NEEDED_GB * 1024 * 1024)) ]; then
        echo "warning: $((free_kb / 1024 / 1024)) GB free here; the environment takes about 5 GB and" \
            "its installation up to $NEEDED_GB GB" >&2
    fi
}

make_venv() {
    python=$(sh scripts/find_python.sh) || exit 2
    if [ -e "$VENV" ] || [ -L "$VENV" ]; then
        say "$VENV is unfinished or was made for another place; building it again"
        rm -rf "$VENV"
    fi
    say "making $VENV with $python"
    if [ -n "$uv" ]; then
        "$uv" venv --quiet --seed --python "$python" "$VENV" 2>/dev/null ||
            "$uv" venv --quiet --python "$python" "$VENV"
    else
        "$python" -m venv "$VENV"
    fi
}

# uv trusts a list of authorities of its own, unlike pip; behind a company's proxy that fails.
trust_what_the_system_trusts() {
    for bundle in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
        if [ -s "$bundle" ]; then export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"; fi
    done
}

# The lines of the lock that belong to uv, for installing it alone.
locked_uv() { awk '/^[^ ]/ { mine = /^uv==/ } mine' "$LOCK"; }

find_uv() {
    uv=$(command -v uv || true)
    if [ -z "$uv" ] && [ -x "$VENV/bin/uv" ]; then uv=$VENV/bin/uv; fi
    if [ -n "$uv" ] && ! "$uv" --version >/dev/null 2>&1; then uv=""; fi
}

bootstrap_uv() {
    locked_uv >"$VENV/uv.lock.txt"
    if pip_install --quiet --no-deps --require-hashes -r "$VENV/uv.lock.txt"; then uv=$VENV/bin/uv; fi
}

pip_install() { "$PY" -m pip --disable-pip-version-check install --no-user "$@"; }

install_lock() {
    say "installing the packages of $LOCK (about 5 GB, most of it torch)"
    if [ -n "$uv" ]; then
        "$uv" pip install --python "$PY" --require-hashes -r "$LOCK" && return
        say "uv did not manage; trying pip, which may know another index or proxy"
    fi
    pip_install --require-hashes -r "$LOCK" ||
        fail "packages could not be installed (reason above); 'make setup' goes on from here"
}

install_project() {
    if [ -n "$uv" ]; then
        "$uv" pip install --quiet --python "$PY" --offline --no-deps --no-build-isolation -e .
    else
        pip_install --quiet --no-index --no-deps --no-build-isolation -e .
    fi || fail "the checkout itself could not be installed (reason above)"
}

if is_ready; then say "$VENV is ready"; exit 0; fi
take_turn
if is_ready; then say "$VENV is ready"; exit 0; fi
start=$(date +%s)
warn_if_disk_is_short
trust_what_the_system_trusts
find_uv
if is_updatable; then
    say "requirements.lock or pyproject.toml has changed; bringing $VENV up to date"
    rm -f "$STAMP"
else
    case $uv in "$VENV"/*) uv="" ;; esac
    make_venv
    [ -n "$uv" ] || bootstrap_uv
fi
install_lock
install_project
fingerprint >"$STAMP.new"
mv "$STAMP.new" "$STAMP"
say "ready in $(($(date +%s) - start)) s ($(du -sh "$VENV" 2>/dev/null | cut -f1) in $VENV)"
