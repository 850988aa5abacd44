"""What a Hugging Face folder holds beside the weights: configs, tokenizer, model card, our mark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_wd
from megatron_wd.config import ModelConfig, UserError, num_parameters
from megatron_wd.convert.checkpoint import Checkpoint

# Written into every export: where it comes from, and which files we wrote (see `refuse_foreign`).
MARK = "megatron_wd.json"


def llama_config(
    model: ModelConfig, *, max_positions: int, dtype: str, ids: dict[str, int | None]
) -> dict[str, Any]:
    """Returns the content of config.json for LlamaForCausalLM.

    Every value that changes the logits is written out, because the defaults of LlamaConfig differ
    from ours (its eps is 1e-6).

    Args:
        model: Shape of the model.
        max_positions: Longest sequence that it was trained on, in tokens.
        dtype: Of the weights, by its torch name.
        ids: `bos_token_id` and `eos_token_id`.
    """
    theta = float(model.rope_theta)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": float(model.norm_eps),
        # transformers 5 reads the first, older versions the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": float(model.dropout),
        "initializer_range": float(model.init_std),
        "use_cache": True,
        **ids,
        # transformers 5 reads the first, older versions the second.
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def generation_config(ids: dict[str, int | None]) -> dict[str, Any]:
    """Returns the content of generation_config.json: plain sampling that ends at the end token."""
    return {**{name: value for name, value in ids.items() if value is not None}, "do_sample": True}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file as transformers does: indented, with a newline at its end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(source: Path, model: ModelConfig, out: Path) -> dict[str, int | None]:
    """Puts the tokenizer into an export, as it was used in training: it adds no BOS and no EOS.

    Args:
        source: The checkpoint's tokenizer folder, or a tokenizer file.
        model: Shape of the model that it has to suit.
        out: The export's folder.

    Returns:
        `bos_token_id` and `eos_token_id`, None for one that the tokenizer does not have.

    Raises:
        UserError: If there is no tokenizer in `source`, or it has more tokens than the model.
    """
    from megatron_wd.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{source} has {tokenizer.vocab_size} tokens, but the model only {model.vocab_size}; "
            f"it is not the tokenizer that the model was trained with."
        )
    tokenizer.save(out)
    settings = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    bos = settings.get("bos_token")
    text = bos.get("content") if isinstance(bos, dict) else bos
    return {
        "bos_token_id": None if text is None else tokenizer.special_ids.get(text),
        "eos_token_id": int(tokenizer.eos_id),
    }


def provenance_of(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """Collects what the model card says: facts from the checkpoint, none of them guessed."""
    config = checkpoint.config
    optim = config.optim
    commit = checkpoint.provenance.get("git_commit")
    return {
        "run": config.run_dir,
        "step": checkpoint.step,
        "steps_planned": config.steps,
        "tokens": checkpoint.tokens,
        "parameters": num_parameters(config.model),
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "decay": optim.decay,
        "schedule": optim.schedule,
        "precision": config.precision,
        "dtype": dtype,
        "seed": config.seed,
        "run_code_commit": commit if isinstance(commit, str) else None,
        "export_version": megatron_wd.__version__,
    }


def model_card(facts: dict[str, Any], config: dict[str, Any]) -> str:
    """Returns README.md of an export.

    Args:
        facts: From `provenance_of`.
        config: Content of config.json.
    """
    name = Path(facts["run"]).name or "model"
    tokens = "unknown" if facts["tokens"] is None else f"{facts['tokens']:,}"
    step = "unknown" if facts["step"] is None else f"{facts['step']:,}"
    rows = {
        "Architecture": f"{config['architectures'][0]}, {facts['parameters']:,} parameters: "
        f"{config['num_hidden_layers']} layers, {config['hidden_size']} wide, "
        f"{config['num_attention_heads']} heads, {config['num_key_value_heads']} key/value heads, "
        f"vocabulary {config['vocab_size']:,}",
        "Run": f"`{facts['run']}`, seed {facts['seed']}",
        "Step": f"{step} of {facts['steps_planned']:,} planned",
        "Tokens trained on": tokens,
        "Peak learning rate": f"{facts['learning_rate']:g} ({facts['schedule']} schedule)",
        "Weight decay": f"{facts['weight_decay']:g} (`optim.decay: {facts['decay']}`)",
        "Training precision": f"{facts['precision']}; exported as {facts['dtype']}",
        "Code": f"commit {facts['run_code_commit'] or 'unknown'}; "
        f"exported by megatron_wd {facts['export_version']}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    # JSON strings are YAML strings too: nothing in a run's name can break the header.
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"model_name: {json.dumps(name)}\n---\n\n"
        f"# {name}\n\nA language model pretrained with megatron_wd. Load it with "
        f"`AutoModelForCausalLM.from_pretrained(FOLDER)`.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"A base model for research: it was not trained to follow instructions or to be safe.\n"
    )


def write_mark(folder: Path, facts: dict[str, Any]) -> None:
    """Writes the mark that says what this folder is; the last file of an export."""
    files = sorted(path.name for path in folder.iterdir())
    write_json(folder / MARK, {"format": 1, "provenance": facts, "files": [*files, MARK]})


def refuse_foreign(folder: Path) -> None:
    """Checks that replacing a folder loses nothing but an earlier export.

    Raises:
        UserError: If it is no export, or holds a file that we did not write.
    """
    mark = folder / MARK
    try:
        content = json.loads(mark.read_text(encoding="utf-8"))
        files = set(content["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder} does not look like an export (no {MARK} in it), so --force does not replace "
            f"it. Give another folder, or remove this one yourself."
        ) from None
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in files)
    if foreign:
        raise UserError(
            f"{folder} holds {foreign[0]}, which no export wrote, so --force does not replace it. "
            f"Move that file, or give another folder."
        )
