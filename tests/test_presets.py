"""Shipped models have the papers' sizes, and shipped runs the papers' numbers."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ranks import run_ranks

from megatron_wd.config import Config, ModelConfig, load_config, load_structured, num_parameters

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted((ROOT / "configs" / "models").glob("*.yaml"))

# The table of arXiv 2602.11137's authors: layers, width, MLP, all parameters.
LLAMA2 = {
    "llama2_125m": (12, 768, 2176, 125_258_496),
    "llama2_250m": (16, 1024, 2992, 250_381_312),
    "llama2_500m": (20, 1536, 3216, 500_921_856),
    "llama2_1b": (22, 2048, 4896, 1_000_564_736),
    "llama2_2b": (26, 2816, 6180, 2_001_694_464),
    "llama2_4b": (28, 4096, 7792, 4_000_288_768),
}
GPT2 = {  # layers, width
    "gpt2_22m": (7, 512),
    "gpt2_64m": (13, 640),
    "gpt2_85m": (12, 768),
    "gpt2_302m": (24, 1024),
    "gpt2_707m": (36, 1280),
}


@dataclass
class Preset:
    model: ModelConfig = field(default_factory=ModelConfig)


def preset(name: str) -> ModelConfig:
    return load_structured(Preset, ROOT / "configs" / "models" / f"{name}.yaml").model


def run(name: str) -> Config:
    return load_config(ROOT / "configs" / f"{name}.yaml")


def without_embeddings(model: ModelConfig) -> int:
    return num_parameters(model, include_embeddings=False)


def test_every_preset_is_checked_here() -> None:
    assert {path.stem for path in MODELS} == {*LLAMA2, *GPT2, "olmo2_1b"}


@pytest.mark.parametrize("name", LLAMA2)
def test_llama2_has_the_sizes_of_the_paper(name: str) -> None:
    model = preset(name)
    layers, width, mlp, total = LLAMA2[name]
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (layers, width, mlp)
    assert (model.num_attention_heads, model.kv_heads, model.vocab_size) == (32, 4, 32000)
    assert num_parameters(model) == total
    assert without_embeddings(model) == total - 2 * 32000 * width


def test_olmo2_has_the_parameters_of_its_shapes() -> None:
    width, mlp, vocab_size, layers = 2048, 8192, 100_278, 16
    attention = 4 * width * width + 2 * width  # q, k, v, output; norms of all queries and all keys
    block = attention + 3 * width * mlp + 2 * width
    inner = layers * block + width
    assert inner + 2 * vocab_size * width == 1_484_613_632
    model = preset("olmo2_1b")
    assert num_parameters(model) == 1_484_613_632
    assert without_embeddings(model) == inner
    assert (model.head_size, model.norm_eps, model.rope_theta) == (128, 1e-6, 500_000.0)


@pytest.mark.parametrize("name", GPT2)
def test_gpt2_is_named_after_its_size_without_embeddings(name: str) -> None:
    model = preset(name)
    layers, width = GPT2[name]
    matrices = 12 * layers * width**2
    assert name == f"gpt2_{matrices / 1e6:.0f}m" or name == f"gpt2_{matrices // 10**6}m"
    # Per block biases of 3 + 1 widths in attention, 4 + 1 in the MLP, two norms of 2; a norm at the end.
    assert without_embeddings(model) == matrices + layers * 13 * width + 2 * width
    assert num_parameters(model) - without_embeddings(model) == (50_257 + 1024) * width
    assert model.head_size == 64 and model.tie_embeddings


def test_gpt2_small_is_gpt2_small() -> None:
    assert num_parameters(preset("gpt2_85m")) == 124_439_808  # of Hugging Face's "gpt2"


def built_parameters() -> dict[str, int]:
    """Parameters of each preset's model, built without memory; padding rows of the tables left out."""
    from megatron_wd.backend.world import pretended_world
    from megatron_wd.config import ParallelConfig
    from megatron_wd.models.build import build_model

    counts = {}
    with pretended_world(ParallelConfig(), rank=0, size=1):
        for path in MODELS:
            model = preset(path.stem)
            (chunk,) = build_model(dataclasses.replace(run("tiny"), model=model))
            padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size
            tables = 1 if model.tie_embeddings else 2
            counts[path.stem] = sum(p.numel() for p in chunk.parameters()) - tables * padding
    return counts


def test_counts_are_those_of_the_models_that_are_built() -> None:
    (built,) = run_ranks(1, built_parameters)
    assert built == {path.stem: num_parameters(preset(path.stem)) for path in MODELS}


# Runs


@pytest.mark.parametrize(
    ("name", "tokens", "steps", "batch_tokens", "lr"),
    [
        # Steps are the papers' (tokens / batch) rounded up.
        ("llama2_500m_20x", 10_000_000_000, 9_537, 1_048_576, 2.5e-4),
        ("llama2_1b_20x", 20_000_000_000, 9_537, 2_097_152, 2e-4),
        ("llama2_4b_20x", 80_000_000_000, 4_769, 16_777_216, 1.5e-4),
        ("olmo2_1b_20x", 30_000_000_000, 14_306, 2_097_152, 4e-4),
        ("olmo2_1b_140x", 210_000_000_000, 100_136, 2_097_152, 4e-4),
    ],
)
def test_runs_of_the_weight_decay_study(
    name: str, tokens: int, steps: int, batch_tokens: int, lr: float
) -> None:
    config = run(f"plasticity/{name}")
    assert (config.train.tokens, config.steps, config.train.step_tokens) == (
        tokens,
        steps,
        batch_tokens,
    )
    optim = config.optim
    assert (optim.lr, optim.beta1, optim.beta2, optim.eps) == (lr, 0.9, 0.95, 1e-8)
    assert (optim.clip_grad_norm, config.train.sequence_tokens) == (1.0, 2048)
    budget = float(name.rsplit("_", 1)[1].removesuffix("x"))
    assert tokens / num_parameters(config.model) == pytest.approx(budget, rel=0.02)
    if name.startswith("llama2"):
        assert (config.model.init, optim.decay, config.seed) == ("scaled", "all", 42)
        assert (optim.schedule, optim.final_lr) == ("cosine", pytest.approx(lr / 10))
        assert config.warmup_steps == -(-steps // 10)
        assert config.train.z_loss == 0.0
    else:
        assert (config.model.init, config.model.init_std) == ("truncated_normal", 0.02)
        assert (optim.decay, config.train.z_loss) == ("no_embeddings", 1e-5)
        assert config.warmup_steps * config.train.step_tokens == 8_388_608_000
        assert optim.schedule == ("wsd" if name.endswith("140x") else "cosine")


def test_thousands_of_ranks_train_the_same_run() -> None:
    few, many = run("plasticity/llama2_4b_20x"), run("plasticity/llama2_4b_20x_4096_ranks")
    assert (many.model, many.optim, many.data, many.seed) == (
        few.model,
        few.optim,
        few.data,
        few.seed,
    )
    assert many.train.step_tokens == few.train.step_tokens and many.steps == few.steps


@pytest.mark.parametrize("name", GPT2)
def test_runs_of_the_learning_rate_study(name: str) -> None:
    config = run(f"lr_laws/{name}")
    assert config.model.num_layers == GPT2[name][0]
    assert config.train.step_tokens == 524_288  # 0.52M
    assert (config.optim.schedule, config.train.tokens) == ("wsd", 100_000_000_000)
    assert 2**-16 <= config.optim.lr <= 2**-7
    shortest = load_config(
        ROOT / "configs" / "lr_laws" / f"{name}.yaml", ["train.tokens=5_000_000_000"]
    )
    # A run of another length shares warmup and stable phase with this one.
    assert shortest.warmup_steps == config.warmup_steps < shortest.steps - shortest.wsd_decay_steps
