"""Schedules as numbers, and decay measured on every tensor after one real step."""

import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import metrics, run_config, run_ranks
from test_families import FAMILIES
from test_layouts import assert_close, forget_after

from megatron_wd.config import Config, UserError, load_config
from megatron_wd.optim.rules import ParameterRule, rates_at, resolve_rules
from megatron_wd.optim.schedule import decay_factor, learning_rate


def schedule(tiny: Path, *overrides: str) -> list[float]:
    config = load_config(tiny, ["optim.lr=1.0", *overrides])
    return [learning_rate(step, config) for step in range(1, config.steps + 1)]


def test_cosine_warms_up_peaks_and_ends_at_a_tenth(tiny: Path) -> None:
    rates = schedule(tiny, "train.steps=25")
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[14] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 2)))
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[4:]))


def test_wsd_is_stable_then_linear(tiny: Path) -> None:
    rates = schedule(tiny, "train.steps=20", "optim.schedule=wsd", "optim.min_lr=0.0")
    assert rates[4:16] == [1.0] * 12
    assert rates[16:] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_constant_stays(tiny: Path) -> None:
    assert schedule(tiny, "optim.schedule=constant")[5:] == [1.0] * 15


RULES = {
    "all": ["optim.decay=all"],
    "matrices_only": ["optim.decay=matrices_only"],
    "no_embeddings": ["optim.decay=no_embeddings"],
    "custom": [
        "optim.decay=null",
        "optim.decay_rules=[{match: '*norm*', multiplier: 0.0, lr_multiplier: 2.0}, "
        "{match: decoder.layers.*.linear_qkv.weight, ndim: 2, weight_decay: 0.25}, "
        "{match: '*', multiplier: 2.0}]",
    ],
}


def wanted_decay(rules: str, name: str) -> tuple[float, float]:
    """(weight decay, multiplier of the rate), worked out apart from the product."""
    if rules == "custom":
        if "norm" in name:
            return 0.0, 2.0
        return (0.25 if name.endswith("linear_qkv.weight") else 1.0), 1.0
    exempt = {
        "all": False,
        "matrices_only": "norm" in name or name.endswith("bias"),
        "no_embeddings": name.startswith("embedding."),
    }[rules]
    return (0.0 if exempt else 0.5), 1.0


@pytest.mark.distributed
@pytest.mark.parametrize(
    "family, rules, layout",
    [
        ("llama2", "all", ["parallel.tensor=2", "precision=bf16"]),
        ("llama2", "matrices_only", ["parallel.pipeline=2"]),
        ("llama2", "custom", ["parallel.tensor=2", "parallel.distributed_optimizer=false"]),
        ("olmo2", "no_embeddings", ["parallel.distributed_optimizer=true"]),
        ("olmo2", "custom", ["parallel.pipeline=2"]),
        ("gpt2", "no_embeddings", ["parallel.tensor=2"]),
        ("gpt2", "matrices_only", ["precision=bf16", "parallel.distributed_optimizer=false"]),
        ("gpt2", "custom", ["parallel.pipeline=2", "precision=bf16"]),
    ],
)
def test_steps_without_gradient_decay_exactly_what_the_table_says(
    family: str, rules: str, layout: list[str], tiny: Path
) -> None:
    options = [*FAMILIES[family], *RULES[rules], *layout, "optim.weight_decay=0.5"]
    schedule = ["optim.decay_schedule={shape: linear, start: 1.0, end: 3.0}", "train.steps=20"]
    run_dir = tiny.parent / f"decay {family} {rules}"
    arguments = [*options, *schedule, f"run_dir={run_dir}"]
    ranks = run_ranks(2, steps_without_gradient, str(tiny), arguments)
    names = set()
    for steps in ranks:
        assert len(steps) == 3  # the first, the second, and the first after a resume
        for step, (lr, rows) in steps.items():
            for name, before, after, listed in rows:
                decay, multiplier = wanted_decay(rules, name)
                assert listed == (decay, multiplier), name
                factor = 1.0 + 2.0 * (step - 1) / 19
                expected = before * (1.0 - lr * multiplier * decay * factor)
                if decay == 0.0:
                    assert torch.equal(after, before), f"{name} at step {step}"
                else:
                    torch.testing.assert_close(after, expected, rtol=1e-7, atol=0, msg=name)
                    assert not torch.equal(after, before), f"{name} at step {step}"
                names.add(name)
    table = (run_dir / "weight_decay.tsv").read_text().splitlines()[1:]
    assert names == {line.split("\t")[0] for line in table}


def steps_without_gradient(config_path: str, overrides: list[str]) -> dict:
    """Two steps with zero gradients, a save, and a third one in a run that has resumed."""
    from megatron_wd.backend import cpu
    from megatron_wd.backend.world import start_world
    from megatron_wd.optim.matrices import master_weights
    from megatron_wd.optim.schedule import learning_rate
    from megatron_wd.train.setup import set_up

    config: Config = load_config(config_path, overrides)
    world = start_world(config.parallel)
    found = {}

    def step(run: Any, number: int) -> None:
        masters = list(master_weights(run.model, run.optimizer.megatron))
        before = [master.weight.detach().clone() for master in masters]
        for chunk in run.model:
            chunk.zero_grad_buffer()
        run.optimizer.set_rates(number)
        with cpu.cuda_requests_on_cpu():
            run.optimizer.megatron.prepare_grads()
            run.optimizer.megatron.step_with_ready_grads()
        rules = [run.optimizer.rules[master.parameter] for master in masters]
        rows = [
            (m.parameter, b, m.weight.detach().clone(), (rule.weight_decay, rule.lr_multiplier))
            for m, b, rule in zip(masters, before, rules, strict=True)
        ]
        found[number] = (learning_rate(number, config), rows)
        run.progress.step = number

    run = set_up(config, world)
    for master in master_weights(run.model, run.optimizer.megatron):
        master.weight.detach().add_(0.1)  # biases are zero else, and show no decay
    step(run, 1)
    step(run, 2)
    run.checkpointer.save(run.progress)
    close(run)
    run = set_up(config, world)
    assert run.progress.step == 2
    step(run, 3)
    return found


def close(run: Any) -> None:
    if run.metrics is not None:
        run.metrics.close()
    for lock in run.lock:
        lock.close()


@pytest.mark.distributed
@pytest.mark.parametrize("mode, wanted", [("coupled", 0.006), ("independent", 0.02)])
def test_independent_decay_does_not_follow_the_rate(mode: str, wanted: float, tiny: Path) -> None:
    rule = ParameterRule("w", (1,), "all", 0.02, 1.0, "adamw")
    options = [f"optim.decay_mode={mode}", "optim.lr=0.3", "optim.schedule=constant"]
    rates = rates_at(20, rule, load_config(tiny, options))
    assert rates.lr * rates.weight_decay + rates.independent_decay == pytest.approx(wanted)
    assert rates_at(1, rule, load_config(tiny, options)).independent_decay == (
        0.02 if mode == "independent" else 0.0
    )


def test_decay_schedules_go_up_and_down(tiny: Path) -> None:
    def factors(schedule: str) -> list[float]:
        config = load_config(tiny, ["train.steps=5", "optim.warmup_steps=0", schedule])
        return [decay_factor(step, config) for step in range(1, 6)]

    assert factors("optim.decay_schedule.shape=constant") == [1.0] * 5
    up = factors("optim.decay_schedule={shape: linear, start: 0.0, end: 2.0}")
    assert up == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
    down = factors("optim.decay_schedule={shape: cosine, start: 2.0, end: 0.0}")
    assert down == pytest.approx([2.0, 1.0 + math.sqrt(0.5), 1.0, 1.0 - math.sqrt(0.5), 0.0])
    points = "points: [{tokens: 256, factor: 1.0}, {tokens: 768, factor: 3.0}]"
    pieces = factors(f"optim.decay_schedule={{shape: piecewise, {points}}}")
    assert pieces == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])


SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    "decoder.layers.0.self_attention.linear_qkv.weight": (12, 4),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (4,),
    "decoder.final_norm.weight": (4,),
}


@pytest.mark.parametrize(
    "rules, message",
    [
        ("[{match: decoder.layers.*.linear_qkw.weight}]", "near it are decoder.layers.0"),
        ("[{match: '*norm*', ndim: 2}]", r"has \[1\] dimensions, not 2"),
        ("[{match: '*'}, {match: '*norm*'}]", "decided by the earlier rule '\\*'"),
        ("[{match: '*qkv*', weight_decay: 0.1}]", "keeps the norm of that matrix fixed"),
    ],
)
def test_wrong_rules_say_what_to_do(rules: str, message: str, tiny: Path) -> None:
    adamh = ["optim.optimizer=adamh", "optim.matrix_lr=1e-2"]
    config = load_config(tiny, [f"optim.decay_rules={rules}", *adamh])
    with pytest.raises(UserError, match=message):
        resolve_rules(SHAPES, config)


@pytest.mark.parametrize(
    "overrides, taken",
    [
        (["optim.weight_decay=500"], "takes 1.5 of a weight at step 5"),
        (["optim.decay_mode=independent", "optim.weight_decay=1.5"], "takes 1.5 of a weight"),
        (
            ["optim.decay_rules=[{match: '*qkv.weight', lr_multiplier: 1e5}]"],
            "takes 30 of a weight at step 5, such as of decoder.layers.0",
        ),
        (
            [
                *("optim.optimizer=muon", "optim.matrix_lr=20.0", "optim.decay=matrices_only"),
                "parallel.distributed_optimizer=false",
            ],
            "takes 2 of a weight",
        ),
        (
            [
                *("optim.decay_mode=independent", "optim.weight_decay=0.5"),
                "optim.decay_schedule={shape: linear, start: 0.1, end: 3.0}",
            ],
            "takes 1.5 of a weight at step 20",
        ),
    ],
)
def test_a_step_that_takes_a_whole_weight_is_refused(
    overrides: list[str], taken: str, tiny: Path
) -> None:
    with pytest.raises(UserError, match=taken):
        resolve_rules(SHAPES, load_config(tiny, overrides))


def test_only_what_is_really_taken_counts(tiny: Path) -> None:
    small = ["optim.decay_rules=[{match: '*', multiplier: 0.1}]", "optim.weight_decay=0.5"]
    rising = ["optim.decay_schedule={shape: linear, start: 1.0, end: 3.0}"]
    config = load_config(tiny, ["optim.decay_mode=independent", *small, *rising])
    assert resolve_rules(SHAPES, config)
    large = ["optim.lr=1.5", "optim.decay_schedule={shape: linear, start: 0.1, end: 0.1}"]
    assert resolve_rules(SHAPES, load_config(tiny, [*large, "optim.weight_decay=0.7"]))


def test_a_parameter_that_no_rule_meets_is_named(tiny: Path) -> None:
    config = load_config(tiny, ["optim.decay=null", "optim.decay_rules=[{match: '*norm*'}]"])
    with pytest.raises(
        UserError, match=r"meets decoder.layers.0.self_attention.linear_qkv.weight, embedding"
    ):
        resolve_rules(SHAPES, config)


@pytest.mark.distributed
def test_muon_takes_the_same_steps_on_every_layout_and_resumes(tiny: Path) -> None:
    muon = ["optim.optimizer=muon", "optim.matrix_lr=0.01", "optim.decay=matrices_only"]
    muon += ["parallel.distributed_optimizer=false", "train.steps=12", "checkpoint.every_steps=6"]
    whole = tiny.parent / "muon"
    assert run_config(1, tiny, f"run_dir={whole}", *muon) == [0]
    for name, (ranks, layout) in {
        "tp2": (2, ["parallel.tensor=2"]),
        "pp2": (2, ["parallel.pipeline=2"]),
        "resumed": (1, []),
    }.items():
        run_dir = tiny.parent / f"muon {name}"
        if name == "resumed":
            shutil.copytree(whole, run_dir)
            forget_after(run_dir, 6)
        assert run_config(ranks, tiny, f"run_dir={run_dir}", *muon, *layout) == [0] * ranks
        # Its iteration computes in bf16, so sums in another order show more than elsewhere.
        assert_close(run_dir, whole, 0.0 if name == "resumed" else 5e-3)
    rows = (whole / "weight_decay.tsv").read_text().splitlines()[1:]
    assert {row.split("\t")[0].rsplit(".", 2)[-2] for row in rows if row.endswith("muon")} == {
        *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    }
    assert metrics(whole)[12]["loss/train"] < metrics(whole)[1]["loss/train"] - 0.3
