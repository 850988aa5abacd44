"""A start that computes nothing: one process plays one rank of every pipeline stage.

torch's fake process group gives each its place among as many ranks as wanted, and the model is built
without memory behind its tensors. So a layout for thousands of GPUs is tried on a laptop.

Imports stay inside: GPUs are hidden before torch is loaded, so that it is the same on every machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wd.backend.launch import count_gpus
from megatron_wd.config import Config, num_parameters, validate_world
from megatron_wd.train.memory import StageMemory, pipeline_memory

if TYPE_CHECKING:
    from megatron_wd.optim.rules import ParameterRule


@dataclass(frozen=True)
class DryRun:
    """What is known without computing.

    Attributes:
        config: the run.
        ranks: how many were pretended.
        stages: one rank of each pipeline stage.
        rules: what was decided for each parameter of the whole model.
        tokens_in_data: of the training corpora; None where any of the data is not on this machine.
        warnings: what could not be checked here.
    """

    config: Config
    ranks: int
    stages: list[StageMemory]
    rules: dict[str, ParameterRule]
    tokens_in_data: int | None
    warnings: list[str]

    @property
    def largest(self) -> StageMemory:
        """The stage whose ranks need most memory."""
        return max(self.stages, key=lambda stage: stage.total_bytes)


def run(config: Config, ranks: int | None = None, *, as_json: bool = False) -> int:
    """Checks a run on pretended ranks and prints what it would be.

    Args:
        config: validated.
        ranks: processes over all nodes; None for as many as hold one copy of the model.
        as_json: prints the numbers as JSON, and nothing else.

    Returns:
        The exit code, 0.

    Raises:
        UserError: as a real start would: the layout does not fit, data or tokenizer are damaged.
    """
    result = dry_run(config, ranks or config.parallel.model_ranks)
    if as_json:
        print(json.dumps(as_record(result), indent=2))
        return 0
    from megatron_wd.train.startup import summary

    who = f"{result.ranks} pretended rank{'s' if result.ranks > 1 else ''}"
    print(summary(config, result.ranks, who, result.rules, result.tokens_in_data, None))
    print("\n" + table(result))
    sys.stdout.flush()
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def dry_run(config: Config, ranks: int) -> DryRun:
    """Builds every pipeline stage of the model on pretended ranks.

    Args:
        config: validated.
        ranks: processes over all nodes.

    Raises:
        UserError: the layout does not fit the ranks, data or tokenizer are damaged.
    """
    validate_world(config, ranks)
    warnings = _missing_abilities(config)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_wd.backend.world import pick_device, quiet_libraries

    quiet_libraries()
    pick_device()  # the CPU, before Megatron Core is imported
    from megatron_wd.train.inputs import check_what_exists

    tokens_in_data, missing = check_what_exists(config)
    if config.init_from is not None and not Path(config.init_from).exists():
        missing.append(config.init_from)
    if missing:
        warnings.append(f"not on this machine, so not checked: {', '.join(missing)}")
    stages = pipeline_memory(config, ranks)
    return DryRun(
        config=config,
        ranks=ranks,
        stages=stages,
        rules=_build_stages(config, ranks, stages),
        tokens_in_data=tokens_in_data,
        warnings=warnings,
    )


def table(result: DryRun) -> str:
    """Parameters and memory of one rank of each pipeline stage, in GB (10^9 bytes)."""
    columns = ("weights", "gradients", "optimizer", "activations", "total")
    head = "  ".join(f"{name:>11}" for name in columns)
    lines = [f"stage  layers      parameters  {head}   (one rank; memory in GB)"]
    for stage in result.stages:
        sizes = (
            *(stage.weight_bytes, stage.gradient_bytes, stage.optimizer_bytes),
            *(stage.activation_bytes, stage.total_bytes),
        )
        cells = "  ".join(f"{size / 1e9:11.3f}" for size in sizes)
        lines.append(f"{stage.stage:5}  {stage.layers:6}  {stage.parameters:14,}  {cells}")
    largest = result.largest
    lines.append(
        f"largest: stage {largest.stage}, about {largest.total_bytes / 1e9:.2f} GB per rank"
    )
    return "\n".join(lines)


def as_record(result: DryRun) -> dict[str, Any]:
    """The numbers for `--json`; sizes in bytes."""
    from megatron_wd.train.checkpoint import checkpoint_bytes

    config = result.config
    data_size = result.ranks // config.parallel.model_ranks
    stages = [{**asdict(stage), "total_bytes": stage.total_bytes} for stage in result.stages]
    return {
        "run_dir": config.run_dir,
        "family": config.model.family,
        "precision": config.precision,
        "ranks": result.ranks,
        "layout": {**asdict(config.parallel), "data": data_size},
        "parameters": num_parameters(config.model),
        "parameters_without_embeddings": num_parameters(config.model, include_embeddings=False),
        "decayed_tensors": sum(row.weight_decay != 0.0 for row in result.rules.values()),
        "tensors": len(result.rules),
        "steps": config.steps,
        "tokens": config.total_tokens,
        "tokens_in_data": result.tokens_in_data,
        "checkpoint_bytes": checkpoint_bytes(config),
        "stages": stages,
        "largest_stage": result.largest.stage,
        "warnings": result.warnings,
    }


def _build_stages(
    config: Config, ranks: int, stages: list[StageMemory]
) -> dict[str, ParameterRule]:
    """Builds the first rank of every stage, and decides every parameter of the whole model."""
    from megatron_wd.backend.world import pretended_world
    from megatron_wd.models.build import build_model
    from megatron_wd.optim.matrices import global_shapes, merge_shapes
    from megatron_wd.optim.rules import resolve_rules

    # Neither changes a parameter, and both need Transformer Engine where the model is built.
    parallel = replace(config.parallel, context=1)
    precision = "bf16" if config.precision == "fp8" else config.precision
    buildable = replace(config, precision=precision, parallel=parallel)
    shapes = []
    for stage in stages:
        first_rank = stage.stage * ranks // parallel.pipeline
        with pretended_world(parallel, rank=first_rank, size=ranks) as world:
            assert world.pipeline_rank == stage.stage, world
            model = build_model(buildable)
            built = sum(param.numel() for chunk in model for param in chunk.parameters())
            assert built == stage.parameters, (
                f"stage {stage.stage}: {built}, not {stage.parameters}"
            )
            shapes.append(global_shapes(model))
    return resolve_rules(merge_shapes(shapes), config)


def _missing_abilities(config: Config) -> list[str]:
    """What the run needs and this machine lacks."""
    asked = []
    if config.precision == "fp8":
        asked.append("precision=fp8")
    if config.parallel.context > 1:
        asked.append(f"parallel.context={config.parallel.context}")
    lacking = [
        name
        for name, present in (
            ("a GPU", count_gpus() > 0),
            ("Transformer Engine", importlib.util.find_spec("transformer_engine") is not None),
        )
        if not present
    ]
    if not asked or not lacking:
        return []
    return [
        f"{' and '.join(asked)} cannot run here: this machine lacks {' and '.join(lacking)}; the layout "
        "was checked all the same"
    ]
