"""AdamW over torch's fused kernel, with the step count where Megatron Core looks for it.

Megatron's distributed optimizer saves and loads one step count per parameter group, as Transformer
Engine's and Apex's optimizers keep it. torch's own AdamW keeps one per parameter, which cannot be loaded
back; so without Transformer Engine this one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with decoupled decay times the learning rate.

    theta <- theta - lr weight_decay theta - lr m_hat / (sqrt(v_hat) + eps)

    Args:
        params: parameters or groups; a group may carry its own lr, weight_decay, betas, eps.
        lr: learning rate.
        betas: decay of the running mean of the gradient and of its square, per step.
        eps: added to the denominator.
        weight_decay: coefficient lambda.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **_megatron_options: Any,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            # Groups without parameters on this rank count too: the step is saved with the group.
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
            count = torch.tensor(float(group["step"]), device=params[0].device)
            torch._fused_adamw_(  # type: ignore[attr-defined]
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [count] * len(params),
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=float(group["weight_decay"]),
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
