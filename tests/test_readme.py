"""The documents show only commands, files, options and configuration keys that exist."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [p for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if p.exists()]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))

# Folders whose paths must exist when a command names them (data/ and runs/ are made by commands).
OURS = ("configs/", "docs/", "launch/", "scripts/", "tests/", "tools/", "megatron_wd/", ".ci/")
INTERPRETERS = ("python", "python3", "bash", "sh", "source", "sbatch", "torchrun")
OTHER_PROGRAMS = (
    *("cat", "cd", "cp", "export", "git", "head", "jq", "kill", "less", "ls", "mkdir", "mv", "rm"),
    *("docker", "lm_eval", "pre-commit", "pyright", "pytest", "ruff", "tail", "tensorboard", "uv"),
    *("do", "done", "for", "scancel", "seq", "squeue", "srun", "ssh", "wait"),
)


def blocks(document: Path, language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    pattern = rf"^```{language}[^\n]*\n(.*?)^```"
    return re.findall(pattern, document.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def command_lines(text: str) -> list[list[str]]:
    """The words of each command; continuation lines are joined, comments and `X=y` taken off."""
    commands: list[list[str]] = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        pieces: list[list[str]] = [[]]
        for word in shlex.split(line.removeprefix("$ "), comments=True):
            if word in ("&&", "|", ";"):
                pieces.append([])
            elif pieces[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
                pieces[-1].append(word)
        commands += [piece for piece in pieces if piece]
    return commands


def problems_of(words: list[str]) -> list[str]:
    """What is wrong with one command line; empty if nothing."""
    program = words[0].removeprefix(".venv/bin/").removesuffix("&")
    problems = [
        f"no such file: {word}"
        for word in words
        if word.startswith(OURS) and "*" not in word and not (ROOT / word.split("::")[0]).exists()
    ]
    if program == "make":
        problems += unknown_targets(words[1:])
    elif program in INTERPRETERS:
        script = next((w for w in words[1:] if w.startswith(("tools/", "launch/"))), None)
        if script and not problems:
            arguments = words[words.index(script) + 1 :]
            problems += unknown_options(script, arguments) + unknown_keys(arguments)
    elif program == "pip":
        problems += unknown_extras(words)
    elif program not in OTHER_PROGRAMS and not (ROOT / program).exists():
        problems.append(f"unknown program: {words[0]}")
    return problems


def unknown_targets(arguments: list[str]) -> list[str]:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))
    named = [a for a in arguments if "=" not in a and not a.startswith("-")]
    return [f"no such make target: {name}" for name in named if name not in targets]


def unknown_extras(words: list[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    named = [e for w in words for e in re.findall(r"^\.\[([\w,-]+)\]$", w)]
    return [f"no such extra: {e}" for names in named for e in names.split(",") if e not in extras]


def help_of(script: str, command: str | None) -> str:
    words = [sys.executable, script, *([command] if command else []), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{script} {command or ''} --help: {result.stderr}"
    return result.stdout


def unknown_options(script: str, arguments: list[str]) -> list[str]:
    """Options of a tool that its own help does not know, sub-commands included."""
    if not script.startswith("tools/") or not script.endswith(".py"):
        return []
    text = help_of(script, None)
    commands = set(re.findall(r"^ {2,4}([a-z][a-z0-9-]*)\b", text, re.MULTILINE))
    if "COMMAND" in text.split("\n\n")[0] or re.search(r"\{[a-z0-9,-]+\}", text.split("\n\n")[0]):
        if not arguments:
            return [f"{script} needs a sub-command"]
        if arguments[0] not in commands and f"{arguments[0]}," not in text.replace("}", ","):
            return [f"{script} has no sub-command {arguments[0]}"]
        if arguments[0] != "--help":
            text = help_of(script, arguments[0])
    options = [a.split("=")[0] for a in arguments if re.match(r"--[a-z]", a)]
    return [f"{script} has no option {o}" for o in options if not re.search(rf"{o}(?![\w-])", text)]


def unknown_keys(arguments: list[str]) -> list[str]:
    """Overrides like `optim.lr=1e-3` after a config file, loaded as the program itself would."""
    from megatron_wd.config import UserError, load_config
    from megatron_wd.finetune.schema import load_finetune_config

    config = next((a for a in arguments if re.fullmatch(r"configs/[\w/.-]+\.yaml", a)), None)
    overrides = [a for a in arguments if re.match(r"[a-z_]+(\.[a-z_]+)*=", a)]
    if "--grid" in arguments:  # of each list of values, the first
        overrides = [a.partition(",")[0] for a in overrides]
    if config is None or config.startswith("configs/studies/"):
        return []
    load = load_finetune_config if config.startswith("configs/finetune/") else load_config
    try:
        load(ROOT / config, overrides)
    except UserError as error:
        return [str(error)]
    return []


def schema_keys() -> set[str]:
    """Every dotted key of a configuration, sections included."""
    from megatron_wd.config import Config
    from megatron_wd.finetune.schema import FinetuneConfig

    def keys(kind: type, prefix: str) -> set[str]:
        found: set[str] = set()
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            found.add(prefix + field.name)
            hint = hints[field.name]
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                found |= keys(hint, f"{prefix}{field.name}.")
        return found

    return keys(Config, "") | keys(FinetuneConfig, "")


def flattened(value: object, prefix: str = "") -> list[str]:
    if not isinstance(value, dict):
        return []
    return [
        key
        for name, inner in value.items()
        for key in (f"{prefix}{name}", *flattened(inner, f"{prefix}{name}."))
    ]


@pytest.mark.skipif(not DOCUMENTS, reason="no documents yet")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_commands_exist(document: Path) -> None:
    found = []
    for block in (*blocks(document, "bash"), *blocks(document, "sh")):
        for words in command_lines(block):
            found += [f"`{' '.join(words)}`: {problem}" for problem in problems_of(words)]
    assert not found, "\n".join(found)


@pytest.mark.skipif(not DOCUMENTS, reason="no documents yet")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_configuration_keys_exist(document: Path) -> None:
    known = schema_keys() | {"base"}
    sections = {key.partition(".")[0] for key in known if "." in key}
    wrong = []
    for block in blocks(document, "yaml"):
        shown = yaml.safe_load(block)
        if isinstance(shown, dict) and shown.keys() & known:
            wrong += [key for key in flattened(shown) if key not in known]
    for code in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:=[^`]*)?`", document.read_text("utf-8")):
        is_file = code.endswith((".py", ".md", ".yaml", ".json", ".sh"))
        if code.partition(".")[0] in sections and code not in known and not is_file:
            wrong.append(code)
    assert not wrong, f"not in the configuration: {wrong}"


def test_first_screen_of_the_readme_has_the_two_commands() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README yet")
    first_screen = "\n".join(readme.read_text("utf-8").splitlines()[:45])
    assert "make quickstart" in first_screen and "make test" in first_screen


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("make quickstart", ""),
        ("make no-such-target", "no such make target"),
        ("python tools/no_such_tool.py --x", "no such file"),
        ("frobnicate", "unknown program"),
        ('.venv/bin/pip install ".[gpu]"', ""),
        ('.venv/bin/pip install ".[tpu]"', "no such extra"),
        ("CUDA_VISIBLE_DEVICES= make test  # a comment", ""),
        ("git clone URL && cd megatron_wd && make nothing", "no such make target"),
    ],
)
def test_the_check_itself_tells_right_from_wrong(line: str, problem: str) -> None:
    found = [p for words in command_lines(line) for p in problems_of(words)]
    assert bool(found) == bool(problem), found
    assert problem in " ".join(found)
