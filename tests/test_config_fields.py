"""Fields of a config that do not go together are named, with their values, before anything runs."""

from pathlib import Path

import pytest

from megatron_wd.config import UserError, load_config, validate_world

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "tiny.yaml"


def message_of(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(TINY, list(overrides))
    return str(caught.value)


LAYOUT = "model.num_query_groups=4"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.num_query_groups=3"], ["num_attention_heads 4", "num_query_groups 3"]),
        (["model.hidden_size=66"], ["hidden_size 66", "num_attention_heads 4"]),
        (["model.hidden_size=60"], ["is 15", "even"]),
        (["model.head_dim=7"], ["model.head_dim is 7"]),
        (["parallel.tensor=4"], ["key/value heads) 2", "parallel.tensor 4"]),
        ([LAYOUT, "parallel.tensor=4", "model.ffn_hidden_size=162"], ["ffn_hidden_size 162"]),
        ([LAYOUT, "parallel.tensor=3"], ["num_attention_heads 4", "padded vocabulary", "hidden"]),
        (["parallel.pipeline=3"], ["num_layers 4", "parallel.pipeline 3"]),
        (["parallel.pipeline=4", "parallel.virtual_pipeline=2"], ["virtual_pipeline 2"]),
        (["parallel.virtual_pipeline=2"], ["virtual_pipeline is 2", "pipeline is 1"]),
        (["parallel.sequence=true"], ["parallel.sequence", "parallel.tensor is 1"]),
        (
            ["parallel.sequence=true", "parallel.tensor=2", "train.sequence_tokens=63"],
            ["sequence_tokens 63", "parallel.tensor 2"],
        ),
        (["parallel.context=2", "train.sequence_tokens=62"], ["sequence_tokens 62", "context 2"]),
        (["train.micro_batch_samples=3"], ["global_batch_samples 8", "micro_batch_samples 3"]),
        (["train.tokens=100"], ["train.steps 20", "train.tokens 100"]),
        (["train.steps=null"], ["neither train.steps nor train.tokens"]),
        (["optim.warmup_fraction=0.1"], ["warmup_steps 2", "warmup_fraction 0.1"]),
        (["optim.warmup_steps=21"], ["warmup_steps 21", "20 steps"]),
        (
            ["optim.schedule=wsd", "optim.warmup_steps=17"],
            ["warmup_steps 17", "wsd_decay_fraction 0.2", "21 steps"],
        ),
        (["optim.min_lr=1"], ["min_lr 1.0", "optim.lr 0.003"]),
        (["data.train=[]"], ["data.train is empty"]),
        (["data.train.0.weight=0"], ["data.train.0.weight is 0"]),
        (["data.train.0.path=a/b.bin"], ["without its ending", "a/b"]),
        (["data.valid=[]"], ["evaluate.every_steps is 10", "data.valid is empty"]),
        (["run_dir=''"], ["run_dir is empty"]),
        (["data.tokenizer=''"], ["data.tokenizer is empty"]),
        (["precision=fp8", "model.hidden_size=72"], ["fp8", "model.hidden_size is 72"]),
        (
            ["precision=fp8", "parallel.tensor=2", "model.ffn_hidden_size=144"],
            ["ffn_hidden_size / parallel.tensor 2 is 72"],
        ),
        (["precision=fp8", "train.sequence_tokens=63"], ["is 63"]),
        (
            ["optim.decay=null"],
            ["optim.decay is null and optim.decay_rules is empty"],
        ),
        (["optim.decay=matrix_only"], ["did you mean matrices_only?"]),
        (
            ["optim.decay_rules=[{match: '*', weight_decay: 1.0, multiplier: 2.0, ndim: 0}]"],
            ["sets weight_decay and multiplier", "ndim is 0"],
        ),
        (
            ["optim.decay_rules=[{match: '*', weight_decay: -1.0, lr_multiplier: -2.0}]"],
            ["weight_decay is -1.0", "lr_multiplier is -2.0"],
        ),
        (
            ["optim.decay_schedule={shape: linear, points: [{tokens: 1, factor: 1.0}]}"],
            ["piecewise needs points"],
        ),
        (
            [
                "optim.decay_schedule={shape: piecewise, end: 2.0, points: "
                "[{tokens: 5, factor: 1.0}, {tokens: 5, factor: -1.0}]}"
            ],
            ["they must rise", "has a factor below 0", "start and end are 1.0 and 2.0"],
        ),
        (["optim.matrix_lr=0.1"], ["optim.optimizer is adamw, which has one rate"]),
        (["optim.optimizer=adamh"], ["optim.matrix_lr is not set"]),
        (
            ["optim.optimizer=muon", "optim.matrix_lr=0.1"],
            ["set parallel.distributed_optimizer=false"],
        ),
        (["model.family=olmo3"], ["did you mean olmo2?"]),
        (
            ["model.family=gpt2", "model.num_query_groups=1"],
            ["as many key/value heads as", "model.max_positions is not set"],
        ),
        (["model.max_positions=16"], ["is more than model.max_positions 16"]),
    ],
)
def test_fields_that_disagree_are_all_named(overrides: list[str], expected: list[str]) -> None:
    message = message_of(*overrides)
    for part in expected:
        assert part in message
    assert str(TINY) in message


@pytest.mark.parametrize(
    "override",
    [
        *["model.num_layers=0", "model.dropout=1", "model.norm_eps=0", "model.vocab_size=-1"],
        *["model.num_query_groups=0", "model.head_dim=0", "model.num_attention_heads=0"],
        *["optim.lr=0", "optim.weight_decay=-0.1", "optim.beta1=1", "optim.beta2=-0.1"],
        *["optim.eps=0", "optim.clip_grad_norm=-1", "optim.warmup_fraction=1.5"],
        *["optim.warmup_steps=-1", "optim.wsd_decay_fraction=2", "optim.min_lr=-1"],
        *["train.steps=0", "train.tokens=0", "train.global_batch_samples=0", "seed=-1"],
        *["train.micro_batch_samples=0", "train.sequence_tokens=0", "parallel.tensor=0"],
        *["parallel.pipeline=0", "parallel.virtual_pipeline=0", "parallel.context=0"],
        *["checkpoint.every_steps=0", "checkpoint.keep_last=0", "evaluate.every_steps=0"],
        *["evaluate.samples=0", "log.every_steps=0", "log.peak_tflops=0", "model.rope_theta=0"],
    ],
)
def test_numbers_out_of_range(override: str) -> None:
    name = override.split("=")[0]
    message = message_of(override)
    assert f"{name} is " in message and "must be" in message


def test_what_is_right_passes() -> None:
    load_config(TINY, ["precision=fp8", "parallel.tensor=2", "parallel.sequence=true"])
    load_config(TINY, ["optim.schedule=wsd", "optim.warmup_steps=16"])
    load_config(TINY, ["data.valid=[]", "evaluate.every_steps=null"])
    load_config(TINY, ["optim.weight_decay=0", "optim.clip_grad_norm=0", "optim.warmup_steps=0"])
    load_config(TINY, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"])


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        (["parallel.tensor=2"], 3, ["3 processes", "parallel.tensor 2", "multiple of 2"]),
        ([], 3, ["global_batch_samples 8", "micro_batch_samples 1", "3 data-parallel"]),
        ([], 16, ["16 data-parallel"]),
        (
            ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "train.global_batch_samples=9"],
            2,
            ["virtual_pipeline 2", "parallel.pipeline 2", "there are 9"],
        ),
    ],
)
def test_the_number_of_processes_must_fit(
    overrides: list[str], world: int, expected: list[str]
) -> None:
    config = load_config(TINY, overrides)
    with pytest.raises(UserError) as caught:
        validate_world(config, world)
    for part in expected:
        assert part in str(caught.value)


def test_numbers_of_processes_that_fit() -> None:
    validate_world(load_config(TINY), 8)
    interleaved = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.tensor=2"]
    validate_world(load_config(TINY, interleaved), 16)
