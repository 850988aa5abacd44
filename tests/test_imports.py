"""The rooms of the package depend on one another in one direction only, and start cheaply."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_wd"

# Lowest first: a room imports from itself and from rooms before it.
ROOMS = (
    "config",
    "backend",
    "data",
    "models",
    "convert",
    "optim",
    "analysis",
    "train",
    "finetune",
    "evals",
    "scaling",
    "study",
)
MEGATRON_CORE_ROOMS = {"backend", "data", "models", "optim", "train", "convert"}
TOOLS = sorted(p for p in (ROOT / "tools").glob("*.py") if not p.name.startswith("_"))


def python_files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """`megatron_wd/config/load.py` -> `megatron_wd.config.load`; for `__init__` the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, nodes: Iterator[ast.AST] | None = None) -> Iterator[tuple[int, str]]:
    """Yields (line, full dotted name) of all that a file imports, at its top or in functions.

    `from a.b import c` yields `a.b.c`, because `c` may be a module. String arguments of
    `import_module` count, so that the rule cannot be stepped around.
    """
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes if nodes is not None else ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            argument = node.args[0]
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


def room_of(dotted: str) -> str | None:
    """The room of a dotted name inside the package; None outside, "" for the package's own top."""
    parts = dotted.split(".")
    if parts[0] != PACKAGE.name:
        return None
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""


def test_every_folder_of_the_package_is_a_known_room() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert folders <= set(ROOMS), f"add to ROOMS, in its place: {folders - set(ROOMS)}"


def test_rooms_import_only_from_rooms_below() -> None:
    wrong = []
    for path in python_files("megatron_wd"):
        here = room_of(module_name(path))
        for line, name in imported_names(path):
            there = room_of(name)
            if not there:
                continue
            if not here or ROOMS.index(there) > ROOMS.index(here):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_package_and_launchers_are_not_imported_upwards() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files("megatron_wd")
        for line, name in imported_names(path)
        if name.split(".")[0] in ("tools", "launch", "tests")
    ]
    assert not wrong, "\n".join(wrong)


def test_megatron_core_stays_in_its_rooms() -> None:
    wrong = []
    for path in python_files("megatron_wd", "tools", "launch"):
        allowed = room_of(module_name(path)) in MEGATRON_CORE_ROOMS
        for line, name in imported_names(path):
            parts = name.split(".")
            if parts[0] != "megatron":
                continue
            if not allowed or (len(parts) > 1 and parts[1] != "core"):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def statements_run_on_import(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes outside function bodies and outside `if TYPE_CHECKING:`."""
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            queue.extend(node.orelse)
            continue
        queue.extend(ast.iter_child_nodes(node))


def test_no_import_cycles() -> None:
    modules = {module_name(path): path for path in python_files("megatron_wd")}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        nodes = statements_run_on_import(ast.parse(path.read_text("utf-8")))
        names = [name for _, name in imported_names(path, nodes)]
        found = {n if n in modules else n.rpartition(".")[0] for n in names} & set(modules)
        # A package's __init__ that gathers its own modules is the usual way, not a cycle.
        graph[module] = {n for n in found if not module.startswith(n + ".")} - {module}

    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for following in sorted(graph[module]):
                visit(following, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.fixture
def tripwire(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch ends the process with a message."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def run_python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_tripwire_notices_torch(tripwire: dict[str, str]) -> None:
    result = run_python(tripwire, "-c", "import torch")
    assert result.returncode != 0
    assert "torch was imported" in result.stderr


def test_config_imports_no_torch(tripwire: dict[str, str]) -> None:
    modules = [m for m in map(module_name, python_files("megatron_wd/config"))]
    result = run_python(tripwire, "-c", "import " + ", ".join(modules))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.name)
def test_tool_help_comes_without_torch(tool: Path, tripwire: dict[str, str]) -> None:
    result = run_python(tripwire, str(tool), "--help")
    assert result.returncode == 0, result.stderr
    assert "usage" in result.stdout.lower()
