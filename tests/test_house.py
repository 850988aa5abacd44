"""House rules that no linter knows: the lock, paths, sizes, and links in the documents."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def repository_files() -> list[Path]:
    """Files that are tracked or would be on the next commit."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def text_of(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return None  # an image


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_entries() -> dict[str, str]:
    """Name -> the entry's text (version, markers, hashes)."""
    entries: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text("utf-8")):
        if not entry.startswith("#") and entry.strip():
            entries[normalized(re.split(r"[=<>\[ ;@]", entry)[0])] = entry
    return entries


def test_lock_has_exact_versions_and_hashes_and_no_addresses() -> None:
    entries = lock_entries()
    assert len(entries) > 50
    for entry in entries.values():
        first = entry.splitlines()[0]
        assert re.match(r"[a-z0-9-]+==[^ ]+", first), first
        assert "--hash=sha256:" in entry, first
        assert "://" not in entry and " @ " not in entry, first
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    assert not re.search(r"--(index|extra-index|find-links|trusted-host)", lock)


def test_lock_covers_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {normalized(re.split(r"[\[<>=!~ ;]", requirement)[0]) for requirement in wanted}
    assert names <= set(lock_entries()), f"run `make lock`: {names - set(lock_entries())}"


def test_no_file_names_a_machine_or_a_registry() -> None:
    # Written in two parts, so that this file passes its own test.
    machine = re.compile(r"(?<![\w.}~-])/(?:" + "root|work|Users|home/[a-z]" + r")/")
    registry = re.compile("py" + r"pi\.org|python" + r"hosted\.org|npm" + r"js\.(com|org)")
    found = []
    for path in repository_files():
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            if machine.search(line) or registry.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_no_large_file_is_tracked() -> None:
    large = [str(p.relative_to(ROOT)) for p in repository_files() if p.stat().st_size > 1_000_000]
    assert not large, f"generated data belongs into data/ or runs/: {large}"


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring (long ones are welcome)."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_files_and_functions_stay_readable() -> None:
    long = []
    for path in repository_files():
        if path.suffix not in (".py", ".sh"):
            continue
        text, name = path.read_text("utf-8"), path.relative_to(ROOT)
        if len(text.splitlines()) > MAX_FILE_LINES:
            long.append(f"{name}: {len(text.splitlines())} lines")
        if path.suffix == ".py":
            functions = [
                node
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            long += [
                f"{name}:{f.lineno} {f.name}: {code_lines(f)} lines"
                for f in functions
                if code_lines(f) > MAX_FUNCTION_LINES
            ]
    assert not long, "look for the second thing these do:\n" + "\n".join(long)


def test_relative_links_lead_somewhere() -> None:
    broken = []
    for path in repository_files():
        if path.suffix != ".md":
            continue
        prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            file = target.split("#")[0]
            elsewhere = not file or "://" in target or target.startswith("mailto:")
            if not elsewhere and not (path.parent / file).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)


def test_changelog_speaks_of_the_current_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## {version}" in changelog or "## Unreleased" in changelog


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    described = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    assert sorted(phony.group(1).split()) == sorted(described)


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda p: p.name)
def test_shell_scripts_parse(path: Path) -> None:
    shell = path.read_text("utf-8").splitlines()[0].rpartition("/")[2].split()[-1]
    result = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
