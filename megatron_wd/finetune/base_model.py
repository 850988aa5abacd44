"""The model that is fine-tuned: where it lies, what it can take, and what identifies it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.convert.hf_load import load_tokenizer
from megatron_wd.finetune.schema import FinetuneConfig

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass
class BaseModel:
    """A Hugging Face folder and its tokenizer.

    Attributes:
        folder: Where it lies on this machine.
        tokenizer: Of transformers. One without a padding token pads with its end-of-text token, in
            batches only: padding is masked and has no loss, so that its id changes nothing.
        dtype: That config.json names, such as "bfloat16".
    """

    folder: Path
    tokenizer: Any
    dtype: str


def open_base_model(config: FinetuneConfig) -> BaseModel:
    """Finds the folder and checks what can be checked without the weights.

    Raises:
        UserError: There is no such model, or it cannot take what the config asks for.
    """
    folder = _find(config.model)
    tokenizer = load_tokenizer(folder)
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model {folder}: its config.json cannot be used: {reason}") from None
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and positions < config.cutoff_tokens:
        raise UserError(
            f"model {folder} takes {positions} positions (max_position_embeddings), but cutoff_tokens is "
            f"{config.cutoff_tokens}. Set cutoff_tokens={positions} or less."
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"model {folder}: its tokenizer has no end-of-text token (eos_token), so a response could "
            "not end. Name one in its tokenizer_config.json."
        )
    if len(tokenizer) > model.vocab_size:
        raise UserError(
            f"model {folder}: the tokenizer has {len(tokenizer)} tokens, but the model's vocabulary is "
            f"{model.vocab_size}: they do not belong together."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = str(getattr(model, "dtype", None) or "float32").removeprefix("torch.")
    return BaseModel(folder, tokenizer, dtype)


def _find(name: str) -> Path:
    path = Path(name)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return path  # load_tokenizer says what is wrong with it
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the library raises many kinds, from many libraries
        reason = (str(error).strip().splitlines() or [repr(error)])[0].rstrip(".")
        raise UserError(
            f"model {name}: there is no such folder here, and no such model could be had from the hub: "
            f"{reason}. Give a folder with config.json, *.safetensors and a tokenizer."
        ) from None


def model_sha256(folder: Path) -> str:
    """A digest over the names and contents of config.json and all weight files of a folder."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name}\0{content}\n".encode())
    return digest.hexdigest()
