"""What measuring every matrix and AdamH cost, against AdamW and against a whole training step.

optimizer_speed.py [--repeats 15] [--precision fp32] [--json]

One process, all cores, the 29M-parameter model of train_speed.py. Updates of AdamW, AdamW with the
measures, and AdamH take turns on the same gradients; medians of each, and of whole steps of AdamW.
Measuring at every tenth step costs (with - without) / (10 steps).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="updates of each (default: 15)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def build(overrides: list[str]) -> tuple[Any, ...]:
    """Config, model, optimizer and meter."""
    from megatron_wd.config import load_config
    from megatron_wd.models.build import build_model, distribute_model
    from megatron_wd.optim.build import build_optimizer
    from megatron_wd.optim.matrices import gather_shapes, master_weights
    from megatron_wd.optim.measure import StepMeter
    from megatron_wd.optim.rules import resolve_rules
    from megatron_wd.train.step import prepare_schedules

    config = load_config(ROOT / "configs/bench/llama2_30m.yaml", overrides)
    model = distribute_model(build_model(config), config)
    rules = resolve_rules(gather_shapes(model), config)
    optimizer = build_optimizer(model, config, rules)
    prepare_schedules(model, optimizer.megatron)
    masters = list(master_weights(model, optimizer.megatron))
    return (
        config,
        model,
        optimizer,
        StepMeter(masters, optimizer.matrices, config.model, config.optim.beta1),
    )


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments()
    import torch

    from megatron_wd.backend.world import quiet_libraries, seed_step, single_process
    from megatron_wd.train.step import forward_backward, update

    quiet_libraries()
    precision = [f"precision={arguments.precision}"]
    adamh = ["optim.optimizer=adamh", "optim.matrix_lr=1e-3"]
    with single_process() as world:
        plain, ball = build(precision), build([*precision, *adamh])
        vocabulary, length = plain[0].model.vocab_size, plain[0].train.sequence_tokens
        tokens = torch.randint(vocabulary, (4, length + 1))
        positions = torch.arange(length).expand(4, length)
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "positions": positions,
        }

        def one_update(of: tuple[Any, ...], *, measured: bool = False) -> float:
            config, model, optimizer, meter = of
            optimizer.set_rates(1)
            started = time.perf_counter()
            update(model, optimizer, config, world, meter if measured else None)
            return time.perf_counter() - started

        def forward(of: tuple[Any, ...]) -> float:
            config, model, optimizer, _ = of
            seed_step(0, 1)
            started = time.perf_counter()
            forward_backward(model, optimizer.megatron, [batch], config)
            return time.perf_counter() - started

        times: dict[str, list[float]] = {
            "adamw": [],
            "adamw_measured": [],
            "adamh": [],
            "step": [],
        }
        for round_number in range(arguments.repeats + 2):
            backward_s = forward(plain)
            adamw_s = one_update(plain)
            forward(plain)
            measured_s = one_update(plain, measured=True)
            forward(ball)
            adamh_s = one_update(ball)
            if round_number >= 2:
                times["step"].append(backward_s + adamw_s)
                times["adamw"].append(adamw_s)
                times["adamw_measured"].append(measured_s)
                times["adamh"].append(adamh_s)
    medians = {name: statistics.median(values) for name, values in times.items()}
    paired = [m - a for m, a in zip(times["adamw_measured"], times["adamw"], strict=True)]
    ratios = [h / a for h, a in zip(times["adamh"], times["adamw"], strict=True)]
    result = {
        "precision": arguments.precision,
        "median_s": medians,
        "measuring_s": statistics.median(paired),
        "measuring_every_tenth_step_share": statistics.median(paired) / (10 * medians["step"]),
        "adamh_over_adamw_update": statistics.median(ratios),
        "adamh_over_adamw_step": 1 + (medians["adamh"] - medians["adamw"]) / medians["step"],
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for name, seconds in medians.items():
        print(f"{name:15} {seconds * 1e3:8.1f} ms (spread {min(times[name]) * 1e3:.1f} to "
              f"{max(times[name]) * 1e3:.1f})")  # fmt: skip
    print(f"measuring at every tenth step: {result['measuring_every_tenth_step_share']:.2%}")
    print(f"AdamH's update: {result['adamh_over_adamw_update']:.2f}x AdamW's; the whole step "
          f"{result['adamh_over_adamw_step']:.3f}x")  # fmt: skip


if __name__ == "__main__":
    main()
