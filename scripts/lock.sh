#!/bin/sh
# Writes requirements.lock from pyproject.toml: one file for Linux (x86_64, aarch64) and macOS, with
# exact versions and hashes and without addresses, so that any index or mirror serves it.
# Present pins are kept where pyproject.toml still allows them; arguments go to uv (--upgrade, ...).
set -eu
cd "$(dirname "$0")/.."
uv=$(command -v uv || echo .venv/bin/uv)
UV_CUSTOM_COMPILE_COMMAND="make lock" "$uv" pip compile pyproject.toml --extra dev --universal \
    --python-version 3.12 --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
    --quiet --output-file requirements.lock "$@" >/dev/null
echo "requirements.lock: $(grep -c '^[a-z]' requirements.lock) packages"
