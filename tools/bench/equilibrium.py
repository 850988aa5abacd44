"""Norm and effective learning rate of a weight that only its direction matters for, against theory.

equilibrium.py [--beta1 0.9] [--out docs/images/equilibrium.png] [--json]

One matrix of 64 x 64 whose loss does not depend on its norm, with random gradients (at right angles to it
then, and shorter the longer it is), under the product's AdamW at weight decay 0.1. Learning rates from 1e-5
to 0.3; after a number of steps the measured norm and effective rate are compared with

    ||W_t||^2 = ||W_inf||^2 + (1 - d)^(2t) (||W_0||^2 - ||W_inf||^2)
    ||W_inf|| = U sqrt(c lr / (wd (2 - d)))
    effective rate: lr U / ||W_0|| before equilibrium (slope 1), sqrt(2 d / c) there (slope 1/2)

with d = lr wd, U the measured length of Adam's direction, and c = (1 + beta1) / (1 - beta1): momentum makes
successive steps alike, and what is alike adds up to more.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

WEIGHT_DECAY = 0.1
SIZE = 64


@dataclass(frozen=True)
class Point:
    """One learning rate after some steps.

    Attributes:
        lr: learning rate.
        steps: steps done.
        norm, effective_lr: measured; the rate over the last tenth of the steps, root mean square.
        predicted_norm, predicted_effective_lr: by theory, with the measured length of Adam's direction.
        relaxed: how far the squared norm has gone to equilibrium, 0 to 1.
    """

    lr: float
    steps: int
    norm: float
    predicted_norm: float
    effective_lr: float
    predicted_effective_lr: float
    relaxed: float


def follow(lr: float, steps: int, beta1: float = 0.9, seed: int = 0) -> Point:
    """Trains the matrix at one learning rate."""
    import torch

    from megatron_wd.config import ModelConfig
    from megatron_wd.optim.adamw import FusedAdamW
    from megatron_wd.optim.matrices import Master, Matrix
    from megatron_wd.optim.measure import StepMeter
    from megatron_wd.optim.rates import PerParameterRates
    from megatron_wd.optim.rules import Rates

    class Adam(PerParameterRates, FusedAdamW):
        """The product's AdamW."""

    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(SIZE, SIZE, generator=generator).requires_grad_()
    first = float(weight.detach().norm())
    adam = Adam([weight], lr=lr, betas=(beta1, 0.95), eps=1e-30, weight_decay=0.0)
    rates = Rates(lr, WEIGHT_DECAY)
    adam.rates_of = lambda _: rates
    master = Master("output_layer.weight", weight, SIZE, SIZE, 0, is_counted=True)
    matrix = Matrix("head", "head", None, "output_layer.weight", SIZE * SIZE)
    model = ModelConfig(hidden_size=SIZE, num_attention_heads=1)
    meter = StepMeter([master], [matrix], model, beta1)
    likeness = (1 + beta1) / (1 - beta1)
    kept, turned, steady = 1.0, [], []
    for step in range(steps):
        with torch.no_grad():
            direction = weight / weight.norm()
            noise = torch.randn(SIZE, SIZE, generator=generator)
            weight.grad = (noise - (noise * direction).sum() * direction) / weight.norm()
        late = step >= steps - steps // 10
        sampled = late or step % 20 == 19
        if sampled:
            meter.before()
        adam.step()
        if sampled:
            measures = meter.after(adam.rates_of)
            at_rest = float(measures.equilibrium_norm)
            steady.append(at_rest * math.sqrt(WEIGHT_DECAY * (2 - rates.decayed) / (lr * likeness)))
            if late:
                turned.append(float(measures.effective_lr))
        kept *= (1 - rates.decayed) ** 2
    length = math.sqrt(sum(u * u for u in steady) / len(steady))  # U
    at_rest = length * math.sqrt(likeness * lr / (WEIGHT_DECAY * (2 - rates.decayed)))
    expected = math.sqrt(at_rest**2 + kept * (first**2 - at_rest**2))
    return Point(
        lr=lr,
        steps=steps,
        norm=float(weight.detach().norm()),
        predicted_norm=expected,
        effective_lr=math.sqrt(sum(x * x for x in turned) / len(turned)),
        predicted_effective_lr=lr * length / expected,
        relaxed=1 - kept,
    )


def slope(points: list[Point]) -> float:
    """Slope of log effective rate over log learning rate, least squares."""
    import numpy as np

    x = np.log([point.lr for point in points])
    return float(np.polyfit(x, np.log([point.effective_lr for point in points]), 1)[0])


def draw(points: list[Point], out: Path) -> None:
    """Measured values and the curves of theory over the learning rate, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    rates = [point.lr for point in points]
    left.loglog(rates, [p.predicted_norm for p in points], "-", label="theory")
    left.loglog(rates, [p.norm for p in points], "o", label="measured")
    left.set(xlabel="learning rate", ylabel="norm", title=f"norm after {points[0].steps:,} steps")
    right.loglog(rates, [p.predicted_effective_lr for p in points], "-", label="theory")
    right.loglog(rates, [p.effective_lr for p in points], "o", label="measured")
    right.set(xlabel="learning rate", ylabel="effective learning rate")
    right.set_title("slope 1 before equilibrium, 1/2 there")
    for axes in (left, right):
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    """Runs all rates and prints or draws them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--beta1", type=float, default=0.9, help="momentum (default: 0.9)")
    parser.add_argument("--out", type=Path, help="picture to write")
    parser.add_argument("--json", action="store_true", help="print the points as JSON")
    arguments = parser.parse_args()
    from megatron_wd.backend.world import quiet_libraries, single_process

    quiet_libraries()
    with single_process():
        rates = [10 ** (-5 + 0.25 * i) for i in range(19)]
        points = [follow(lr, arguments.steps, arguments.beta1) for lr in rates]
    early = [p for p in points if p.relaxed < 0.05]
    rest = [p for p in points if p.relaxed > 0.99]
    if arguments.out:
        draw(points, arguments.out)
    if arguments.json:
        print(json.dumps([asdict(point) for point in points], indent=2))
        return
    for p in points:
        print(
            f"lr {p.lr:.2e}  norm {p.norm:9.3f} (theory {p.predicted_norm:9.3f})  "
            f"effective {p.effective_lr:.3e} (theory {p.predicted_effective_lr:.3e})  "
            f"relaxed {p.relaxed:.2f}"
        )
    print(
        f"slope before equilibrium {slope(early):.3f} (1), at equilibrium {slope(rest):.3f} (0.5)"
    )


if __name__ == "__main__":
    main()
