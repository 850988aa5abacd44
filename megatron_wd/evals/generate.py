"""Text from a language model in a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_wd.config import UserError
from megatron_wd.convert.hf_load import load_model, load_tokenizer


def generate(
    folder: Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    num_samples: int = 1,
    temperature: float | None = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> list[str]:
    """Continues a text.

    Args:
        folder: Hugging Face folder with model and tokenizer.
        prompt: Text to go on from; may be empty.
        max_new_tokens: Most tokens to add; the model may end earlier.
        num_samples: Continuations to draw.
        temperature: Divides the logits before drawing; None takes the most likely token each time.
        top_p: Draws only from the most likely tokens whose probabilities add up to this.
        seed: Of the draws.

    Returns:
        The continuations, without the prompt.

    Raises:
        UserError: If the folder cannot be loaded, or the text gets longer than the model can be.
    """
    import torch

    tokenizer = load_tokenizer(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, "auto" if device == "cuda" else "float32").to(device)
    ids = tokenizer(prompt)["input_ids"] or _start_of_text(model, tokenizer)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and len(ids) + max_new_tokens > limit:
        raise UserError(
            f"the prompt has {len(ids)} tokens; with --max-new-tokens {max_new_tokens} the text "
            f"gets longer than the {limit} tokens that the model is made for. Ask for fewer."
        )
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
    if temperature is not None:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    torch.manual_seed(seed)
    with torch.no_grad():
        prompt_ids = torch.tensor([ids], device=device)
        outputs = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=max_new_tokens,
            num_return_sequences=num_samples,
            pad_token_id=_first(model.generation_config.eos_token_id),
            **sampling,
        )
    # Both are decoded from the start: a tokenizer may drop the space before a text's first word.
    known = len(tokenizer.decode(ids, skip_special_tokens=True))
    return [
        tokenizer.decode(output.tolist(), skip_special_tokens=True)[known:] for output in outputs
    ]


def _start_of_text(model: Any, tokenizer: Any) -> list[int]:
    """The token that stands before a text: the start token, or the end of the text before it."""
    for token in (tokenizer.bos_token_id, _first(model.generation_config.eos_token_id)):
        if token is not None:
            return [token]
    raise UserError("an empty --prompt needs a tokenizer with a start or an end token.")


def _first(ids: int | list[int] | None) -> int | None:
    return ids[0] if isinstance(ids, list) else ids
