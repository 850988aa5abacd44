"""Says what a folder holds: a run, a checkpoint of either kind, or a Hugging Face folder.

Descriptions and lists of tensors are read, no weights; nothing here needs torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_wd.config import ModelConfig, UserError, num_parameters
from megatron_wd.convert.checkpoint import Checkpoint, open_checkpoint, steps_in
from megatron_wd.convert.dcp import TensorFolder
from megatron_wd.convert.families import converted_family
from megatron_wd.convert.hf_folder import MARK
from megatron_wd.convert.weights import Weights, is_hf_folder, open_weights, weights_of

_KINDS = {
    "huggingface": "Hugging Face folder",
    "megatron_wd": "checkpoint",
    "megatron_lm": "Megatron-LM checkpoint (GPTModel)",
}
_OPTIMIZER = ("optimizer.", "chained_")


def inspect_folder(path: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Collects what a folder says of itself; what nothing says is None.

    Args:
        path: A run folder, its `checkpoints` folder, a checkpoint of ours or of Megatron-LM's
            GPTModel, a result of from-hf, or a Hugging Face folder.
        step: The checkpoint of this step, where there are several; None for the latest.

    Raises:
        UserError: If it is none of them, or damaged.
    """
    folder = Path(path)
    if is_hf_folder(folder):
        weights = open_weights(folder, step)
        return {
            "kind": _KINDS[weights.kind],
            "path": str(folder),
            **_weights_facts(weights),
            **_export_facts(folder),
            **_tokenizer_facts(weights.tokenizer),
        }
    checkpoint = open_checkpoint(folder, step)
    weights = weights_of(checkpoint)
    return {
        "kind": _kind(checkpoint, weights),
        "path": str(checkpoint.folder),
        "steps": steps_in(folder),
        **_weights_facts(weights),
        **_run_facts(checkpoint),
        **_tokenizer_facts(checkpoint.tokenizer),
    }


def _kind(checkpoint: Checkpoint, weights: Weights) -> str:
    if checkpoint.config is None and "source_architecture" in checkpoint.provenance:
        return "checkpoint made from a Hugging Face folder"
    return _KINDS[weights.kind]


def _weights_facts(weights: Weights) -> dict[str, Any]:
    model = weights.model
    files = [p for p in weights.path.rglob("*") if p.is_file()]
    return {
        "family": model.family,
        "architecture": converted_family(model.family).architecture,
        **_sizes(model),
        "parameters": num_parameters(model),
        "parameters_without_embeddings": num_parameters(model, include_embeddings=False),
        "dtype": ", ".join(sorted(weights.dtypes)),
        "optimizer_state": _has_optimizer(weights),
        "disk_bytes": sum(p.stat().st_size for p in files),
    }


def _sizes(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta if model.facts.positions == "rotary" else None,
        "tie_embeddings": model.tie_embeddings,
    }


def _has_optimizer(weights: Weights) -> bool:
    if weights.kind == "huggingface":
        return False
    return any(name.startswith(_OPTIMIZER) for name in TensorFolder(weights.path).tensors)


def _run_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    config, recorded = checkpoint.config, checkpoint.provenance
    facts: dict[str, Any] = {"step": checkpoint.step, "tokens": checkpoint.tokens}
    if config is None:
        keys = ("source", "source_architecture", "learning_rate", "weight_decay")
        return facts | {key: recorded.get(key) for key in keys}
    return facts | {
        "run": config.run_dir,
        "initial_weights": config.init_from,
        "steps_planned": config.steps,
        "learning_rate": config.optim.lr,
        "weight_decay": config.optim.weight_decay,
        "precision": config.precision,
        "layout": recorded.get("layout"),
        "git_commit": recorded.get("git_commit"),
    }


def _export_facts(folder: Path) -> dict[str, Any]:
    """What an export of ours says of the run it came from."""
    try:
        recorded = json.loads((folder / MARK).read_text(encoding="utf-8"))["provenance"]
        keys = ("run", "source", "step", "steps_planned", "tokens", "learning_rate", "weight_decay")
        return {key: recorded.get(key) for key in keys}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _tokenizer_facts(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {"tokenizer": None}
    from megatron_wd.data.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        return {"tokenizer": {"problem": str(error)}}
    identity = tokenizer.identity()
    return {"tokenizer": {key: identity[key] for key in ("kind", "vocab_size", "eos_id")}}


def describe(facts: dict[str, Any]) -> str:
    """Returns the facts as lines for a person."""
    positions = f"{facts['max_positions']:,} positions" if facts["max_positions"] else ""
    rope = f"rope theta {facts['rope_theta']:g}" if facts["rope_theta"] else ""
    vocabulary = f"vocabulary {facts['vocab_size']:,}{', tied' * facts['tie_embeddings']}"
    state = "with optimizer state" if facts["optimizer_state"] else "no optimizer state"
    rows = {
        "kind": facts["kind"],
        "path": facts["path"],
        "model": _listed(
            f"{facts['family']} ({facts['architecture']}): {facts['num_layers']} layers",
            f"hidden {facts['hidden_size']}",
            f"MLP {facts['ffn_hidden_size']}",
            f"heads {facts['num_attention_heads']} x {facts['head_dim']} "
            f"(KV {facts['num_query_groups']})",
        ),
        "": _listed(vocabulary, positions, rope, f"norm eps {facts['norm_eps']:g}"),
        "parameters": f"{facts['parameters']:,} ({facts['parameters_without_embeddings']:,} without "
        f"embeddings)",
        "weights": f"{facts['dtype']}, {state}, {facts['disk_bytes'] / 1e6:,.1f} MB on disk",
        "tokenizer": _tokenizer_line(facts["tokenizer"]),
        **_run_rows(facts),
    }
    return "\n".join(f"{key:<12}{value}".rstrip() for key, value in rows.items() if value)


def _run_rows(facts: dict[str, Any]) -> dict[str, str]:
    steps = facts.get("steps") or []
    done = _counted("step", facts.get("step")), _counted("tokens", facts.get("tokens"))
    planned = _counted("planned steps", facts.get("steps_planned"))
    layout = facts.get("layout")
    sizes = layout.items() if isinstance(layout, dict) else ()
    learning_rate, decay = facts.get("learning_rate"), facts.get("weight_decay")
    return {
        "run": facts.get("run") or "",
        "source": facts.get("source") or "",
        "from": facts.get("initial_weights") or "",
        "trained": _listed(*done, planned),
        "steps": ", ".join(str(number) for number in steps),
        "layout": _listed(*(f"{key} {value}" for key, value in sizes if value is not False)),
        "optimizer": _listed(
            "" if learning_rate is None else f"learning rate {learning_rate:g}",
            "" if decay is None else f"weight decay {decay:g}",
        ),
        "code": facts.get("git_commit") or "",
    }


def _tokenizer_line(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "none"
    if "problem" in tokenizer:
        return tokenizer["problem"]
    return (
        f"{tokenizer['kind']}, vocabulary {tokenizer['vocab_size']:,}, eos id {tokenizer['eos_id']}"
    )


def _counted(what: str, number: int | None) -> str:
    return "" if number is None else f"{what} {number:,}"


def _listed(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
