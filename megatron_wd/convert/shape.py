"""The shape of a model by itself: a config.yaml that holds `model:` and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_wd.config import (
    Config,
    CorpusConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    UserError,
    load_config,
    load_structured,
    resolved_yaml,
    validate,
)
from megatron_wd.config.source import parse_yaml


@dataclass
class _ShapeFile:
    model: ModelConfig = field(default_factory=ModelConfig)


def read_shape(path: Path) -> tuple[ModelConfig, Config | None]:
    """Reads a config.yaml: that of a run, or one that holds only the shape of a model.

    Returns:
        The shape, and the config of the run where there is one.

    Raises:
        UserError: Naming file, line, key and remedy.
    """
    content, _ = parse_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path))
    if isinstance(content, dict) and set(content) == {"model"}:
        model = load_structured(_ShapeFile, path).model
        try:
            check_shape(model)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        return model, None
    config = load_config(path)
    return config.model, config


def shape_yaml(model: ModelConfig) -> str:
    """Returns the text of a config.yaml that holds only the shape; a run's config can build on it."""
    return resolved_yaml(_ShapeFile(model))


def check_shape(model: ModelConfig) -> None:
    """Checks a shape as that of a run's config is checked.

    Raises:
        UserError: Naming the fields of `model`.
    """
    validate(run_around(model))


def run_around(model: ModelConfig) -> Config:
    """A run of a model, for code that wants one: on one rank, in fp32, the rest made up."""
    return Config(
        run_dir="-",
        model=model,
        data=DataConfig(tokenizer="-", train=[CorpusConfig(path="-")]),
        optim=OptimConfig(lr=1.0),
        train=TrainConfig(
            steps=1, global_batch_samples=1, micro_batch_samples=1, sequence_tokens=1
        ),
    )
