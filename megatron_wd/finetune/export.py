"""The finished model as a Hugging Face folder: complete or absent."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_wd.convert.output_folder import appears_when_done, files_of
from megatron_wd.finetune.base_model import BaseModel
from megatron_wd.finetune.run_folder import HF_FOLDER
from megatron_wd.finetune.schema import FinetuneConfig

MARK = "finetune.json"  # what the folder is, for programs
# What belongs to the tokenizer and to sampling is handed on as it was.
_HANDED_ON = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *(
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "generation_config.json",
    ),
)


def export(config: FinetuneConfig, base: BaseModel, trainer: Any, record: dict[str, Any]) -> Path:
    """Writes weights, tokenizer and card of a finished run; every rank calls it.

    Args:
        config: The run.
        base: What it began with.
        trainer: After training.
        record: What to write about the run into `finetune.json`, beside its settings.

    Returns:
        The folder, in the run's folder.
    """
    target = Path(config.run_dir) / HF_FOLDER
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # of all ranks, on rank 0
    if not trainer.is_world_process_zero():
        return target
    dtype = base.dtype if config.save_dtype == "base" else config.save_dtype
    weights = _cast(weights, getattr(torch, dtype))
    needed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    with appears_when_done(target, needed, force=False) as folder:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.save_pretrained(folder, state_dict=weights)
        for path in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", path)  # they come readable for their owner only
        for name in _HANDED_ON:
            if (base.folder / name).is_file():
                shutil.copyfile(base.folder / name, folder / name)
        _write_config(base.folder / "config.json", folder / "config.json", dtype)
        (folder / "README.md").write_text(_card(config, record), encoding="utf-8")
        content = {"format": 1, **record, "config": asdict(config)}
        content["files"] = files_of(folder, MARK)
        (folder / MARK).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return target


def _cast(weights: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Casts every tensor once, so that tied ones stay one tensor."""
    done: dict[tuple[int, torch.Size], torch.Tensor] = {}
    cast = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in done:
            done[key] = tensor.to(dtype)
        cast[name] = done[key]
    return cast


def _write_config(source: Path, target: Path, dtype: str) -> None:
    """The base model's own config.json with the dtype of the new weights.

    (The one that was just saved names the padding token that only our batches have.)
    """
    content = json.loads(source.read_text(encoding="utf-8"))
    for key in {"dtype", "torch_dtype"} & content.keys() or {"dtype"}:
        content[key] = dtype
    target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _card(config: FinetuneConfig, record: dict[str, Any]) -> str:
    data, optim, train = record["data"], config.optim, config.train
    title = f"{Path(config.model).name}, fine-tuned on {config.task.name}"
    length = f"{record['steps']:,} steps of {train.batch_samples} samples"
    rows = {
        "Base model": f"`{config.model}` (sha256 {record['base_model_sha256'][:12]})",
        "Data": f"{config.task.name}, {data['samples']:,} samples; {config.task.origin or 'no origin given'}",
        "Licence of the data": config.task.licence or "not given",
        "Length": f"{train.epochs:g} epochs, {length}" if train.max_steps is None else length,
        "Learning rate": f"{optim.lr:g} ({optim.schedule}, warmup {optim.warmup_fraction:g})",
        "Weight decay": f"{optim.weight_decay:g}",
        "Seed": str(config.seed),
        "Prompt": f"`{json.dumps(config.template, ensure_ascii=False)}`",
        "Code": f"megatron_wd {record['megatron_wd']}, commit {record['git_commit']}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {title}\n\n"
        f"Full-parameter fine-tuning with megatron_wd; the loss was on responses only.\n\n| | |\n|---|---|\n"
        f"{table}\n"
    )
