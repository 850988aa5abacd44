"""Loads models and tokenizers from Hugging Face folders.

A stranger's folder is data: no code of it runs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_wd.config import UserError

# From this machine only, and no code of the folder.
_SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_model(folder: Path, dtype: str = "float32") -> Any:
    """Loads a causal language model for evaluation.

    Args:
        folder: Hugging Face folder with safetensors weights.
        dtype: A torch dtype's name, or "auto" for the folder's own.

    Returns:
        The transformers model, in evaluation mode, on the CPU.

    Raises:
        UserError: If the folder holds no such model, or weights are missing or left over.
    """
    from transformers import AutoModelForCausalLM

    with _explained(folder, "model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,  # a .bin file is a pickle
            output_loading_info=True,
            **_SAFE,
        )
    model, info = loaded
    # transformers only warns, and goes on with random weights.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            first = sorted(str(key) for key in info[kind])[0]
            raise UserError(f"{folder}: weights do not fit config.json ({kind}: {first}, ...).")
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of a Hugging Face folder.

    Raises:
        UserError: If it has none.
    """
    from transformers import AutoTokenizer

    with _explained(folder, "tokenizer"):
        return AutoTokenizer.from_pretrained(folder, **_SAFE)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        found = (
            "is no Hugging Face folder: it has no config.json"
            if folder.is_dir()
            else "is no folder"
        )
        raise UserError(
            f"{folder} {found}. Export a checkpoint with: python tools/convert.py to-hf RUN OUT"
        )


@contextmanager
def _explained(folder: Path, what: str) -> Iterator[None]:
    """Turns what transformers raises for a bad folder into one message, and silences its advice."""
    _check_folder(folder)
    import transformers
    from safetensors import SafetensorError

    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: its {what} cannot be loaded: {reason}") from error
