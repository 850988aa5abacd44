"""Tokenizers: a Hugging Face folder (tokenizer.json) or a SentencePiece .model, behind one
interface.

Three promises hold on every path. Encoding adds no BOS and no EOS. Text that merely spells a
special token (`</s>`, `<|endoftext|>`) stays text: as a token it would cut a document in two. And
the fast encoder is used only after it has been seen to agree with the reference one on the user's
own text (`use_fast`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wd.config import UserError
from megatron_wd.data import special_tokens as specials
from megatron_wd.data.fast_encoder import FastEncoder
from megatron_wd.data.sentencepiece_model import CONTROL, parse_model, to_tokenizer_json

# Files of a Hugging Face folder that belong to the tokenizer besides tokenizer.json.
_SIDE_FILES = ("special_tokens_map.json", "chat_template.jinja", "added_tokens.json")
_POST_PROCESSORS_THAT_KEEP_IDS = ("ByteLevel",)


def load_tokenizer(path: str | Path, eos_id: int | None = None) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        path: A folder with tokenizer.json or tokenizer.model, or one of these files.
        eos_id: Token that ends a document, where the tokenizer's own is missing or not wanted.

    Raises:
        UserError: Nothing usable at `path`, or no end-of-document token can be found.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"tokenizer {path}: no such file or folder; give a Hugging Face folder with "
            "tokenizer.json "
            "or a SentencePiece .model"
        )
    if path.is_dir():
        if _is_saved_sentencepiece(path) or not (path / "tokenizer.json").is_file():
            file = path / "tokenizer.model"
        else:
            file = path / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"tokenizer {path}: neither tokenizer.json nor tokenizer.model in this folder; "
                "load it "
                "with transformers' AutoTokenizer and save_pretrained() it once to get a "
                "tokenizer.json"
            )
    else:
        file = path
    if file.suffix == ".json":
        return HuggingFaceTokenizer(path, file, eos_id)
    if file.suffix.startswith(".model"):
        return SentencePieceTokenizer(path, file, eos_id)
    raise UserError(f"tokenizer {path}: expected a folder, a tokenizer.json or a .model file")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        kind: "huggingface" or "sentencepiece".
        vocab_size: Number of ids that the model needs (largest id + 1).
        eos_id: The token that ends a document.
        sha256: Hash of what decides the ids; the same after `save` and `load_tokenizer`.
        special_ids: Special tokens by spelling; never produced from text.
    """

    kind: str
    vocab_size: int
    eos_id: int
    sha256: str
    special_ids: dict[str, int]

    def __init__(self, path: Path, eos_id: int | None):
        self.path = path
        self._eos_override = eos_id
        self._fast: FastEncoder | None = None

    @property
    def is_fast(self) -> bool:
        """Whether the fast encoder is in use."""
        return self._fast is not None

    def identity(self) -> dict[str, Any]:
        """What a tokenized corpus remembers of its tokenizer."""
        return {
            "kind": self.kind,
            "sha256": self.sha256,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
        }

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes documents: one int32 array each, without BOS or EOS, special spellings as
        text.
        """
        if self._fast is not None:
            return self._fast.encode_batch(texts)
        return self.encode_reference(texts)

    def encode_reference(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The same through the library that defines the tokenizer (slower)."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Turns ids back into text; special tokens appear by their spelling where they have one."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Writes files from which transformers' AutoTokenizer encodes text to the same ids."""
        raise NotImplementedError

    def use_fast(self, samples: Sequence[str]) -> str | None:
        """Turns the fast encoder on if it agrees with the reference on probes and on `samples`.

        Args:
            samples: Some of the text that is to be encoded.

        Returns:
            None if the fast encoder is now in use, else one line saying why not.
        """
        self._fast = None
        try:
            fast = FastEncoder(self._fast_source())
        except ValueError as error:
            return str(error)
        probes = specials.probes(list(self.special_ids))
        reason = fast.differs_from(self.encode_reference, [*probes, *samples])
        if reason is None:
            self._fast = fast
        return reason

    def use_reference(self) -> None:
        """Turns the fast encoder off."""
        self._fast = None

    def _fast_source(self) -> str:
        raise NotImplementedError

    def _set_fast_unchecked(self, fast: bool) -> Tokenizer:
        if fast:
            self._fast = FastEncoder(self._fast_source())
        return self

    def __reduce__(self):
        # For worker processes that are spawned, not forked: they load it again.
        return _restore, (str(self.path), self._eos_override, self.is_fast)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, encoded by the `tokenizers` library."""

    kind = "huggingface"

    def __init__(self, path: Path, file: Path, eos_id: int | None = None):
        super().__init__(path, eos_id)
        self._folder = file.parent
        self._settings = specials.read_json(self._folder / "tokenizer_config.json")
        self._definition = _read_definition(file)
        model = self._definition["model"]
        added = self._definition["added_tokens"]
        ids = _vocabulary(model) | {token["content"]: token["id"] for token in added}
        self.vocab_size = max(ids.values()) + 1
        named = specials.named_tokens(self._folder, self._settings)
        for token in added:
            # Some folders name their EOS in tokenizer_config.json only; it is special all the same.
            token["special"] = bool(token["special"]) or token["content"] in named.values()
        self.special_ids = {token["content"]: token["id"] for token in added if token["special"]}
        self.eos_id = specials.find_eos(
            str(path), self._folder, named, ids, self.special_ids, self.vocab_size, eos_id
        )
        self.sha256 = _content_hash(self._definition)

    @cached_property
    def _reference(self) -> Any:
        import tokenizers

        reference = tokenizers.Tokenizer.from_str(json.dumps(self._definition))
        reference.encode_special_tokens = True
        return reference

    def encode_reference(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See the base class."""
        found = self._reference.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in found]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See the base class."""
        return self._reference.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        """See the base class. The saved tokenizer adds no BOS, as the training data has none."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _SIDE_FILES:
            if (self._folder / name).is_file() and self._folder.resolve() != folder.resolve():
                shutil.copyfile(self._folder / name, folder / name)
        text = json.dumps(self._definition, ensure_ascii=False)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        dropped = ("auto_map", "add_bos_token", "add_eos_token", "legacy", "tokenizer_file")
        settings = {k: v for k, v in self._settings.items() if k not in dropped}
        # The class that takes tokenizer.json as it is; LlamaTokenizer and others rebuild parts of
        # it.
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings["clean_up_tokenization_spaces"] = False
        eos = next((s for s, i in self._ids_by_text().items() if i == self.eos_id), None)
        if eos is not None:
            settings["eos_token"] = eos
        _write_json(folder / "tokenizer_config.json", settings)

    def _ids_by_text(self) -> dict[str, int]:
        return self.special_ids | _vocabulary(self._definition["model"])

    def _fast_source(self) -> str:
        added = [token for token in self._definition["added_tokens"] if not token["special"]]
        return json.dumps({**self._definition, "added_tokens": added}, ensure_ascii=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece BPE model, encoded by the `sentencepiece` library."""

    kind = "sentencepiece"

    def __init__(self, path: Path, file: Path, eos_id: int | None = None):
        super().__init__(path, eos_id)
        self._data = file.read_bytes()
        self._model = parse_model(self._data, str(file))
        self.sha256 = hashlib.sha256(self._data).hexdigest()
        pieces = self._model.pieces
        self.vocab_size = len(pieces)
        self.special_ids = {p.text: i for i, p in enumerate(pieces) if p.type == CONTROL}
        folder = file.parent if path.is_dir() else None
        settings = specials.read_json(folder / "tokenizer_config.json") if folder else {}
        named = specials.named_tokens(folder, settings)
        own = self._processor.eos_id()
        if own >= 0:
            named.setdefault("eos_token", pieces[own].text)
        ids = {piece.text: i for i, piece in enumerate(pieces)}
        self.eos_id = specials.find_eos(
            str(path), folder, named, ids, self.special_ids, self.vocab_size, eos_id
        )

    @cached_property
    def _processor(self) -> Any:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=self._data)

    def encode_reference(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See the base class."""
        found = self._processor.encode(list(texts), num_threads=1)
        return [np.array(ids, dtype=np.int32) for ids in found]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See the base class."""
        return self._processor.decode([int(i) for i in ids])

    def save(self, folder: str | Path) -> None:
        """See the base class; the .model itself is kept beside the converted tokenizer.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(self._data)
        text = to_tokenizer_json(self._model, match_control=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        pieces, processor = self._model.pieces, self._processor
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**12,
            "eos_token": pieces[self.eos_id].text,
            # Tells load_tokenizer() that the .model defines this folder (see
            # _is_saved_sentencepiece).
            "sentencepiece_sha256": self.sha256,
        }
        names = {"bos_token": "bos_id", "unk_token": "unk_id", "pad_token": "pad_id"}
        for name, method in names.items():
            index = getattr(processor, method)()
            if index >= 0:
                settings[name] = pieces[index].text
        _write_json(folder / "tokenizer_config.json", settings)

    def _fast_source(self) -> str:
        return to_tokenizer_json(self._model, match_control=False)


def _restore(path: str, eos_id: int | None, fast: bool) -> Tokenizer:
    return load_tokenizer(path, eos_id)._set_fast_unchecked(fast)


def _is_saved_sentencepiece(folder: Path) -> bool:
    """Whether `SentencePieceTokenizer.save` wrote this folder and nobody has changed its .model
    since.
    """
    expected = specials.read_json(folder / "tokenizer_config.json").get("sentencepiece_sha256")
    file = folder / "tokenizer.model"
    return bool(
        expected and file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == expected
    )


def _read_definition(file: Path) -> dict[str, Any]:
    """tokenizer.json without what would pad, cut or add tokens, and with merges in one spelling."""
    try:
        definition = json.loads(file.read_text(encoding="utf-8"))
        model = definition["model"]
        _vocabulary(model)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"tokenizer {file}: not a Hugging Face tokenizer.json ({error})") from None
    definition["added_tokens"] = definition.get("added_tokens") or []
    definition["truncation"] = definition["padding"] = None
    post = definition.get("post_processor")
    if post is not None and post.get("type") not in _POST_PROCESSORS_THAT_KEEP_IDS:
        definition["post_processor"] = None
    merges = model.get("merges")
    if merges and isinstance(merges[0], str):
        model["merges"] = [merge.split(" ") for merge in merges]
    return definition


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {entry[0]: i for i, entry in enumerate(vocabulary)}  # Unigram: [[piece, score], ...]


def _content_hash(definition: dict[str, Any]) -> str:
    """Hash of the parts that decide the ids, whatever the order and spacing of the JSON."""
    added = sorted(
        (token["id"], token["content"], token["special"]) for token in definition["added_tokens"]
    )
    parts = [definition.get(key) for key in ("model", "normalizer", "pre_tokenizer")]
    text = json.dumps([*parts, added], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
