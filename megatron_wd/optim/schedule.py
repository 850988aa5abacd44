"""The learning rate of every step, as a pure function.

Nothing is counted or remembered: a resumed run computes the same number from the same step.
"""

from __future__ import annotations

import math

from megatron_wd.config import Config


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of a step.

    Linear warmup to the peak at step `warmup_steps`, then
    "cosine": half a cosine from the peak to the final rate at the last step;
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
    if config.optim.schedule == "cosine":
        progress = (step - warmup) / max(1, total - warmup)
        return final + 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))) * (peak - final)
    if config.optim.schedule == "wsd":
        decay = config.wsd_decay_steps
        remaining = max(0, total - step)
        return peak if remaining >= decay else final + (peak - final) * remaining / decay
    return peak
