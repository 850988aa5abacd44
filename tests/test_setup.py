"""Finding a Python and starting the setup, on machines that are not as one wishes."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REFUSES = "#!/bin/sh\necho 'pyenv: command not found in this version' >&2\nexit 127\n"


def old_python(version: str) -> str:
    """A stand-in that runs what it is given, after claiming to be another version."""
    return f"""#!/bin/sh
shift 2
exec {sys.executable} -I -c "import sys; sys.version_info = ({version}); exec(sys.argv.pop(1))" "$@"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder that is PATH, with the usual shell tools and no Python at all."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "env", "dirname", "cat", "mkdir", "rm", "date", "df", "awk", "sleep"):
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    if importlib.util.find_spec("ensurepip") is None:  # then only uv makes environments here
        put(folder, "uv", REFUSES)
    return folder


def put(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def find_python(machine: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine), "HOME": str(machine.parent), **extra}
    script = str(ROOT / "scripts" / "find_python.sh")
    return subprocess.run(["sh", script], env=environment, capture_output=True, text=True)


def this_python() -> str:
    return f'#!/bin/sh\nexec {sys.executable} "$@"\n'


def test_old_and_refusing_pythons_are_passed_over(machine: Path) -> None:
    put(machine, "python3", old_python("3, 11, 2"))
    put(machine, "python3.12", REFUSES)
    put(machine, "python3.13", old_python("3, 13, 0"))
    result = find_python(machine)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == sys.executable
    put(machine, "python3.13", REFUSES)
    assert find_python(machine).returncode == 2


def test_python_that_only_pyenv_has_is_found(machine: Path) -> None:
    put(machine.parent, ".pyenv/versions/3.12.1/bin/python3", this_python())
    assert find_python(machine).stdout.strip() == sys.executable
    elsewhere = str(machine.parent / "elsewhere")
    assert find_python(machine, PYENV_ROOT=elsewhere).returncode == 2


def test_python_without_ready_made_packages_comes_last(machine: Path) -> None:
    put(machine, "python3", old_python("3, 15, 0"))
    result = find_python(machine)
    assert result.returncode == 0 and "compiled" in result.stderr
    put(machine, "python3.12", old_python("3, 12, 1"))
    result = find_python(machine)
    assert result.returncode == 0 and not result.stderr


def test_named_python_is_the_only_candidate(machine: Path) -> None:
    put(machine, "python3", this_python())
    result = find_python(machine, PYTHON="no-such-python")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "no-such-python" in result.stderr
    assert find_python(machine, PYTHON=sys.executable).stdout.strip() == sys.executable


def test_setup_without_python_says_what_to_install_and_leaves_nothing(machine: Path) -> None:
    checkout = machine.parent / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "scripts/find_python.sh", "requirements.lock"):
        shutil.copy(ROOT / name, checkout / name)
    before = sorted(os.listdir(checkout))
    result = subprocess.run(
        ["sh", "scripts/setup.sh"],
        cwd=checkout,
        env={"PATH": str(machine), "HOME": str(machine.parent)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "error: no Python >= 3.12 found; install one" in result.stderr
    assert "make setup PYTHON=" in result.stderr
    assert sorted(os.listdir(checkout)) == before
