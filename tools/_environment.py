"""Finds the package, and says in one line which command makes the environment where it is missing.

Every tool imports this first. It must itself run where nothing is installed: only the standard
library, parseable by Python 3.8. As a program it checks the Python that runs it: exit code 0 or 2.
"""

from __future__ import annotations

import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NEEDED_VERSION = (3, 12)
NEEDED_PACKAGES = ("torch", "megatron.core", "numpy", "omegaconf", "yaml")


def missing_packages():
    """Names the packages that cannot be found, without importing (and so waiting for) them."""
    missing = []
    for name in NEEDED_PACKAGES:
        try:
            found = importlib.util.find_spec(name) is not None
        except ImportError:
            found = False
        if not found:
            missing.append(name)
    return missing


def problem(command):
    """Says what this Python lacks for `command` (a list of words); None if nothing."""
    if sys.version_info < NEEDED_VERSION:
        what = "is Python {}.{}, not 3.12 or later".format(*sys.version_info[:2])
    else:
        missing = missing_packages()
        if not missing:
            return None
        what = "has no " + ", ".join(missing)
    python = sys.executable or "this Python"
    place = "" if os.getcwd() == ROOT else " in " + ROOT
    return f"{python} {what}: run `make setup`{place}, then `{' '.join(command)}`"


def require():
    """Makes the repository importable, or ends the program with exit code 2."""
    script = os.path.relpath(sys.argv[0] or "script.py")
    command = (
        [script] if script.endswith(".sh") else [os.path.join(".venv", "bin", "python"), script]
    )
    message = problem([*command, "..."])
    if message:
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)


if __name__ == "__main__":
    # launch/pretrain.sh asks each Python it finds, and has the last one's answer shown.
    message = problem(sys.argv[1:] or ["launch/pretrain.sh", "..."])
    if message:
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)
else:
    require()
