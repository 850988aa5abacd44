#!/bin/sh
# Runs pyright offline: with the node that the environment holds, and without asking for news.
cd "$(dirname "$0")/.." || exit 1
export PYRIGHT_PYTHON_GLOBAL_NODE=0 PYRIGHT_PYTHON_IGNORE_WARNINGS=1
exec .venv/bin/python -m pyright "$@"
