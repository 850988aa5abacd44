"""Building Megatron Core's optimizer around AdamW, and telling it rate and decay of every step."""

from __future__ import annotations

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import nn

from megatron_wd.backend import cpu
from megatron_wd.config import Config
from megatron_wd.models.names import named_parameters
from megatron_wd.optim.adamw import FusedAdamW
from megatron_wd.optim.decay import decays


def build_optimizer(model: list[nn.Module], config: Config) -> MegatronOptimizer:
    """Builds the optimizer of this rank's chunks (already wrapped for data parallelism).

    With Transformer Engine or Apex it runs their fused Adam, elsewhere torch's fused kernel. Decaying
    and other parameters form two groups, told apart by Megatron's `wd_mult` (1 or 0).
    """
    half = config.precision in ("bf16", "fp8")
    optim = config.optim
    exempt = {
        id(param)
        for name, param in named_parameters(model)
        if not decays(name, param.dim(), optim.decay)
    }
    no_decay = ParamWithNamePredicate(name="no_decay", fn=lambda param, name: id(param) in exempt)
    _use_fused_adamw()
    with cpu.cuda_requests_on_cpu():
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=optim.final_lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.beta1,
                adam_beta2=optim.beta2,
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad_norm,
                bf16=half,
                params_dtype=torch.bfloat16 if half else torch.float32,
                use_distributed_optimizer=config.parallel.distributed_optimizer,
            ),
            model,  # type: ignore[arg-type]
            config_overrides={ParamKey(with_name_predicate=no_decay): {"wd_mult": 0.0}},
        )


def set_rates(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Writes the rate and decay that the next update uses into every group.

    Megatron builds its groups with the full decay in each and leaves it to its own scheduler to apply
    `wd_mult`, so without this call norms would decay on the first step.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]


def _use_fused_adamw() -> None:
    """Makes Megatron build `FusedAdamW` where neither Transformer Engine nor Apex is installed.

    For the rest of the process: the distributed optimizer asks at every save and load whether the step
    count lies in the parameter groups, as Apex keeps it, and so does `FusedAdamW`.
    """
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    megatron_optimizer.Adam = FusedAdamW
    distrib_optimizer.Adam = FusedAdamW
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
