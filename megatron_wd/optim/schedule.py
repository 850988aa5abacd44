"""The learning rate and the weight decay of every step, as pure functions.

Nothing is counted or remembered: a resumed run computes the same number from the same step.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_wd.config import Config


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of a step.

    Linear warmup to the peak at step `warmup_steps`, then
    "cosine": half a cosine from the peak to the final rate at the last step;
    "linear": a straight line from the peak to the final rate at the last step;
    "wsd": the peak, then linear over the last `wsd_decay_steps` to the final rate at the last step;
    "constant": the peak.

    Args:
        step: from 1 (the first update) to `config.steps`.
        config: `optim.lr`, `optim.min_lr`, `optim.schedule` and the warmup.

    Returns:
        The rate that the update of this step uses.
    """
    peak, final = config.optim.lr, config.optim.final_lr
    warmup, total = config.warmup_steps, config.steps
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if config.optim.schedule == "cosine":
        return final + 0.5 * (1.0 + math.cos(math.pi * progress)) * (peak - final)
    if config.optim.schedule == "linear":
        return final + (1.0 - progress) * (peak - final)
    if config.optim.schedule == "wsd":
        decay = config.wsd_decay_steps
        remaining = max(0, total - step)
        return peak if remaining >= decay else final + (peak - final) * remaining / decay
    return peak


def decay_factor(step: int, config: Config) -> float:
    """What every weight decay is multiplied by at a step.

    Args:
        step: from 1 to `config.steps`.
        config: `optim.decay_schedule` and the tokens of a step.
    """
    schedule = config.optim.decay_schedule
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "piecewise":
        tokens = [point.tokens for point in schedule.points]
        factors = [point.factor for point in schedule.points]
        return float(np.interp((step - 1) * config.train.step_tokens, tokens, factors))
    progress = min(1.0, (step - 1) / max(1, config.steps - 1))
    if schedule.shape == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return schedule.start + progress * (schedule.end - schedule.start)
