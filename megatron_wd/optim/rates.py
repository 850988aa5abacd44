"""Learning rate and weight decay of each parameter, for whatever Adam Megatron holds.

Megatron tells parameters apart by groups, which become part of its checkpoints: a run could not go on with
other rules. Here Megatron sees one group. Its parameters are divided by rate and decay at each step, and
AdamH's matrices are updated apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_wd.optim.adamh import Hyperball
from megatron_wd.optim.rules import Rates


class PerParameterRates(torch.optim.Optimizer):
    """Gives an Adam (torch's, Transformer Engine's or Apex's) rates of its own for every parameter.

    Attributes:
        rates_of: the rates of a parameter at the coming step.
        hyperball: updates the parameters of AdamH; None where there are none.
    """

    rates_of: Callable[[Tensor], Rates] | None = None
    hyperball: Hyperball | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None and self.rates_of is not None, "rates are set before each step"
        groups = self.param_groups
        try:
            for group in groups:
                self._step_group(group, self.rates_of)
        finally:
            self.param_groups = groups

    def _step_group(self, group: dict[str, Any], rates_of: Callable[[Tensor], Rates]) -> None:
        done = group.get("step", 0)
        parts: dict[Rates, list[Tensor]] = {}
        for param in group["params"]:
            parts.setdefault(rates_of(param), []).append(param)
        for rates, params in parts.items():
            if rates.is_hyperball:
                continue
            if rates.independent_decay:
                torch._foreach_mul_(params, 1.0 - rates.independent_decay)  # type: ignore[attr-defined]
            mine = {"params": params, "lr": rates.lr, "weight_decay": rates.weight_decay}
            self.param_groups = [{**group, **mine, "step": done}]
            super().step()
        # Also where this rank has no parameter: the step is saved with the group.
        group["step"] = done + 1
        if self.hyperball is not None:
            self.hyperball.step(self.state, group, rates_of)
