"""What a Hugging Face folder holds beside the weights: tokenizer, model card, our mark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_wd
from megatron_wd.config import ModelConfig, UserError, num_parameters
from megatron_wd.convert.checkpoint import Checkpoint
from megatron_wd.convert.output_folder import files_of

# Written into every export: where it comes from, and which files we wrote (see `output_folder`).
MARK = "megatron_wd.json"
# Files of a tokenizer in a Hugging Face folder.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


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
    config, recorded = checkpoint.config, checkpoint.provenance
    facts: dict[str, Any] = {
        "run": None if config is None else config.run_dir,
        "source": recorded.get("source"),
        "step": checkpoint.step,
        "tokens": checkpoint.tokens,
        "parameters": num_parameters(checkpoint.model),
        "dtype": dtype,
    }
    if config is None:
        for name in ("source_architecture", "learning_rate", "weight_decay", "seed"):
            facts[name] = recorded.get(name)
    else:
        optim, commit = config.optim, recorded.get("git_commit")
        facts |= {
            "initial_weights": config.init_from,
            "steps_planned": config.steps,
            "learning_rate": optim.lr,
            "weight_decay": optim.weight_decay,
            "decay": optim.decay,
            "schedule": optim.schedule,
            "precision": config.precision,
            "seed": config.seed,
            "run_code_commit": commit if isinstance(commit, str) else None,
        }
    return {**facts, "export_version": megatron_wd.__version__}


def model_card(facts: dict[str, Any], model: ModelConfig, architecture: str) -> str:
    """Returns README.md of an export.

    Args:
        facts: From `provenance_of`.
        model: Shape of the model.
        architecture: Its class in transformers.
    """
    name = Path(str(facts["run"] or facts["source"] or "model")).name
    rows = {
        "Architecture": f"{architecture}, {facts['parameters']:,} parameters: {model.num_layers} "
        f"layers, {model.hidden_size} wide, {model.num_attention_heads} heads, {model.kv_heads} "
        f"key/value heads, vocabulary {model.vocab_size:,}",
        **(_run_rows(facts) if facts["run"] else _source_rows(facts)),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    # JSON strings are YAML strings too: nothing in a run's name can break the header.
    made = "pretrained" if facts["run"] else "converted"
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"model_name: {json.dumps(name)}\n---\n\n"
        f"# {name}\n\nA language model {made} with megatron_wd. Load it with "
        f"`AutoModelForCausalLM.from_pretrained(FOLDER)`.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"A base model for research: it was not trained to follow instructions or to be safe.\n"
    )


def _run_rows(facts: dict[str, Any]) -> dict[str, str]:
    start = f", from the weights of `{facts['initial_weights']}`" * bool(facts["initial_weights"])
    return {
        "Run": f"`{facts['run']}`, seed {facts['seed']}{start}",
        "Step": f"{_number(facts['step'])} of {facts['steps_planned']:,} planned",
        "Tokens trained on": _number(facts["tokens"]),
        "Peak learning rate": f"{facts['learning_rate']:g} ({facts['schedule']} schedule)",
        "Weight decay": f"{facts['weight_decay']:g} (`optim.decay: {facts['decay']}`)",
        "Training precision": f"{facts['precision']}; exported as {facts['dtype']}",
        "Code": f"commit {facts['run_code_commit'] or 'unknown'}; "
        f"exported by megatron_wd {facts['export_version']}",
    }


def _source_rows(facts: dict[str, Any]) -> dict[str, str]:
    """What is known of weights that no run of ours made."""
    known = {
        "Source": facts["source"] and f"`{facts['source']}`",
        "Step": facts["step"] and _number(facts["step"]),
        "Tokens trained on": facts["tokens"] and _number(facts["tokens"]),
        "Peak learning rate": facts["learning_rate"],
        "Weight decay": facts["weight_decay"],
        "Weights": f"exported as {facts['dtype']} by megatron_wd {facts['export_version']}",
    }
    return {key: str(value) for key, value in known.items() if value is not None}


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def write_mark(folder: Path, facts: dict[str, Any]) -> None:
    """Writes the mark that says what this folder is; the last file of an export."""
    content = {"format": 1, "provenance": facts, "files": files_of(folder, MARK)}
    write_json(folder / MARK, content)
