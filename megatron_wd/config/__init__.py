"""Configuration: what a run is asked to do. Imports no torch, so that mistakes show at once."""

from megatron_wd.config.errors import UserError
from megatron_wd.config.load import diff_from_defaults, load_config, load_structured, resolved_yaml
from megatron_wd.config.schema import (
    DECAY_PRESETS,
    VOCAB_MULTIPLE,
    CheckpointConfig,
    Config,
    CorpusConfig,
    DataConfig,
    DecayRuleConfig,
    EvaluateConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    num_parameters,
)
from megatron_wd.config.validate import validate, validate_world

__all__ = [
    "DECAY_PRESETS",
    "VOCAB_MULTIPLE",
    "CheckpointConfig",
    "Config",
    "CorpusConfig",
    "DataConfig",
    "DecayRuleConfig",
    "EvaluateConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "TrainConfig",
    "UserError",
    "diff_from_defaults",
    "load_config",
    "load_structured",
    "num_parameters",
    "resolved_yaml",
    "validate",
    "validate_world",
]
