"""The quickstart's corpus: the running Python's own standard library, about 30 MB of text that is
always there.

Files are split into training and validation by a hash of their path; a SentencePiece tokenizer is
trained on some of the training files. The same Python gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.data.encoding import Rules
from megatron_wd.data.indexed_writer import SUFFIXES
from megatron_wd.data.prepare import Prepared, prepare_corpus

VOCAB_SIZE = 4096
VALIDATION_FRACTION = 0.03
_RECIPE = 1  # raise it when the same sources are to give other files
_TRAINING_CHARACTERS = 6_000_000  # more does not change the pieces much, and takes longer
_SENTENCE_CHARACTERS = 4_000
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
_MINIMUM_FILES = 50


@dataclass
class Sources:
    """Python files of the standard library.

    Attributes:
        train: Paths of the files to train on.
        valid: Paths of the files to validate on.
        sha256: Hash of names and contents, of what the outputs are made from.
    """

    train: list[str]
    valid: list[str]
    sha256: str


def find_sources(root: str | None = None) -> Sources:
    """Lists *.py below the standard library (or another folder), without installed packages.

    Raises:
        UserError: Hardly any source there (some systems ship Python compiled or zipped).
    """
    root = root or sysconfig.get_path("stdlib")
    found: dict[str, str] = {}
    for folder, folders, leaves in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for leaf in leaves:
            if leaf.endswith(".py"):
                path = os.path.join(folder, leaf)
                found[Path(path).relative_to(root).as_posix()] = path
    if len(found) < _MINIMUM_FILES:
        raise UserError(
            f"{root} holds {len(found)} Python source files, too few to train on; use a Python "
            "that comes "
            "with its sources, or prepare your own text with tools/prepare_data.py"
        )
    digest = hashlib.sha256(f"{_RECIPE} {VOCAB_SIZE} {VALIDATION_FRACTION}\n".encode())
    train, valid = [], []
    for name in sorted(found):
        content = hashlib.sha256(Path(found[name]).read_bytes()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode("utf-8", "surrogateescape"))
        (valid if _fraction(name) < VALIDATION_FRACTION else train).append(found[name])
    return Sources(train, valid, digest.hexdigest())


def train_tokenizer(paths: list[str]) -> bytes:
    """Trains the tokenizer; returns the content of the .model file.

    Nothing is normalised and spaces are kept, so that decoding gives the text back: in Python,
    indentation is meaning. Digits stand alone, bytes stand in for what has no piece.
    """
    import sentencepiece

    sentences: list[str] = []
    characters = 0
    # By hash, not by name: files of one package lie together and would be all of the sample.
    for path in sorted(paths, key=lambda path: _fraction(os.path.basename(path))):
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        size = _SENTENCE_CHARACTERS
        sentences += [text[at : at + size] for at in range(0, len(text), size)]
        characters += len(text)
        if characters > _TRAINING_CHARACTERS:
            break
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        byte_fallback=True,
        character_coverage=0.9995,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        max_sentence_length=8 * _SENTENCE_CHARACTERS,
        input_sentence_size=0,
        shuffle_input_sentence=False,
        num_threads=2,
        minloglevel=2,
    )
    return model.getvalue()


def prepare_quickstart(
    output: str | Path,
    *,
    root: str | None = None,
    workers: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Makes OUTPUT/{tokenizer.model, train.*, valid.*}; does nothing if they are there already.

    Args:
        output: Folder to write.
        root: Where the sources are; None is the running Python's standard library.
        workers: Processes that encode.
        say: Called with a line about each step.

    Returns:
        Content of OUTPUT/quickstart.json.

    Raises:
        UserError: No sources, the folder cannot be written, or holds files that are not ours.
    """
    folder = Path(output)
    marker = folder / "quickstart.json"
    sources = find_sources(root)
    names = [f"{split}{suffix}" for split in ("train", "valid") for suffix in SUFFIXES]
    names.insert(0, "tokenizer.model")
    old = _read_marker(marker)
    if old.get("sources_sha256") == sources.sha256 and old.get("files") == _sizes(folder, names):
        say(f"{folder}: complete already, made from the same sources")
        return old
    if not old and (there := [name for name in names if (folder / name).exists()]):
        raise UserError(f"{folder} holds {', '.join(there)}, not made by this tool; choose another")
    # From here on the folder is ours, and incomplete until the last line.
    _write(marker, json.dumps({"sources_sha256": None}).encode())
    say(f"training a tokenizer of {VOCAB_SIZE} pieces on {len(sources.train)} files")
    _write(folder / "tokenizer.model", train_tokenizer(sources.train))
    splits: dict[str, Any] = {}
    for split, paths in (("train", sources.train), ("valid", sources.valid)):
        prepared: Prepared = prepare_corpus(
            paths,
            str(folder / split),
            str(folder / "tokenizer.model"),
            input_format="text",
            rules=Rules(on_error="skip"),
            workers=workers,
            force=True,
            say=say,
        )
        (description,) = prepared.outputs.values()
        keys = ("documents", "tokens", "text_bytes", "empty_documents", "skipped_documents")
        splits[split] = {key: description[key] for key in keys}
        say(f"{split}: {description['documents']:,} documents, {description['tokens']:,} tokens")
    result = {"sources_sha256": sources.sha256, "files": _sizes(folder, names), **splits}
    _write(marker, (json.dumps(result, indent=2) + "\n").encode())
    return result


def _fraction(name: str) -> float:
    """A number in 0..1 that depends on the name only."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _read_marker(marker: Path) -> dict[str, Any]:
    try:
        value = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _sizes(folder: Path, names: list[str]) -> dict[str, int] | None:
    """Size of every file, None if one is missing."""
    try:
        return {name: (folder / name).stat().st_size for name in names}
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or path}: {error.strerror}") from None
