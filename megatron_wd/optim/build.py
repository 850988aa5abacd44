"""Building Megatron Core's optimizer, and telling it the rates of every parameter at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    distrib_optimizer,
    emerging_optimizers,
    get_megatron_optimizer,
)
from torch import Tensor, nn

from megatron_wd.backend import cpu
from megatron_wd.config import Config, UserError
from megatron_wd.optim.adamh import Hyperball
from megatron_wd.optim.adamw import FusedAdamW
from megatron_wd.optim.matrices import Matrix, list_matrices, master_weights
from megatron_wd.optim.rates import PerParameterRates
from megatron_wd.optim.rules import ParameterRule, Rates, rates_at


@dataclass
class RatedOptimizer:
    """Megatron's optimizer, and what each parameter's rate and decay are.

    Attributes:
        megatron: the optimizer; its gradients, clipping and checkpoints are Megatron's.
        config: the run.
        rules: what was decided for each parameter of the whole model.
        matrices: all matrices of the model.
        hyperball: AdamH's matrices; None under other optimizers.
        rates_of: rates of a master weight of this rank at the step of `set_rates`.
    """

    megatron: MegatronOptimizer
    config: Config
    rules: Mapping[str, ParameterRule]
    matrices: list[Matrix]
    hyperball: Hyperball | None = None
    rates_of: Callable[[Tensor], Rates] = field(init=False)
    _rule_of: dict[int, ParameterRule] = field(default_factory=dict)
    _parts: list[PerParameterRates] = field(default_factory=list)

    def set_rates(self, step: int) -> None:
        """Sets what the update of a step does to every parameter.

        Args:
            step: from 1. Nothing is remembered, so a resumed run computes the same.
        """
        rates = {key: rates_at(step, rule, self.config) for key, rule in self._rule_of.items()}
        self.rates_of = lambda weight: rates[id(weight)]
        for part in self._parts:
            part.rates_of = self.rates_of

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads means and step count; betas and eps are those of the config, not of the checkpoint."""
        self.megatron.load_state_dict(state)
        optim = self.config.optim
        for group in (group for part in self._parts for group in part.param_groups):
            if "betas" in group:  # Muon has none
                group["betas"], group["eps"] = (optim.beta1, optim.beta2), optim.eps

    def decayed(self, step: int) -> dict[str, float]:
        """The part of each parameter of the whole model that decays at a step."""
        rules = self.rules.items()
        return {name: rates_at(step, rule, self.config).decayed for name, rule in rules}


def build_optimizer(
    model: list[nn.Module], config: Config, rules: Mapping[str, ParameterRule]
) -> RatedOptimizer:
    """Builds the optimizer of this rank's chunks (already wrapped for data parallelism). Collective.

    With Transformer Engine or Apex it runs their fused Adam, elsewhere torch's fused kernel; Muon is the
    one of Megatron's registry.

    Args:
        model: the chunks.
        config: the run.
        rules: from `resolve_rules`, for the whole model.

    Raises:
        UserError: AdamH would keep a matrix at a norm of zero.
    """
    _use_rated_adam()
    if config.optim.optimizer == "muon":
        _use_rated_muon()
    with cpu.cuda_requests_on_cpu():
        megatron = get_megatron_optimizer(
            _megatron_config(config),
            model,  # type: ignore[arg-type]
            config_overrides={},
        )
    shapes = {rule.name: rule.shape for rule in rules.values()}
    matrices = list_matrices(shapes, config.model)
    optimizer = RatedOptimizer(megatron, config, rules, matrices)
    masters = list(master_weights(model, megatron))
    optimizer._rule_of = {id(master.weight): rules[master.parameter] for master in masters}
    inner: list[Any] = getattr(megatron, "chained_optimizers", [megatron])
    optimizer._parts = [one.optimizer for one in inner if one.optimizer is not None]
    if config.optim.optimizer == "adamh":
        balls = [m for m in masters if rules[m.parameter].optimizer == "adamh"]
        optimizer.hyperball = Hyperball(balls, matrices, config.model)
        _check_radii(optimizer.hyperball.named_radii())
        optimizer._parts[0].hyperball = optimizer.hyperball
    return optimizer


def _check_radii(radii: Mapping[str, float]) -> None:
    empty = [name for name, radius in radii.items() if radius == 0.0]
    if empty:
        raise UserError(
            f"optim.optimizer=adamh keeps the norm of every matrix, but {empty[0]} is all zeros and would "
            "stay so. Start from weights that are not, or use optim.optimizer=adamw."
        )


def _megatron_config(config: Config) -> OptimizerConfig:
    optim, half = config.optim, config.precision in ("bf16", "fp8")
    return OptimizerConfig(
        optimizer="muon" if optim.optimizer == "muon" else "adam",
        # Orthogonalised over all tensor-parallel ranks, or the step would depend on the layout.
        muon_tp_mode="duplicated",
        muon_nesterov=True,
        # Rates are given at each step. Megatron knows its groups by these when it loads a checkpoint, so
        # they must not follow the config, or no rate could be changed on resume.
        lr=1.0,
        min_lr=0.0,
        weight_decay=0.0,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad_norm,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
    )


def _use_rated_muon() -> None:
    """Makes Megatron's registry build a Muon with `PerParameterRates`."""
    entry = emerging_optimizers._EMERGING_OPTIMIZERS["muon"]
    if not issubclass(entry.optimizer_cls, PerParameterRates):
        entry.optimizer_cls = type("RatedMuon", (PerParameterRates, entry.optimizer_cls), {})


def _use_rated_adam() -> None:
    """Makes Megatron build an Adam with `PerParameterRates`: Transformer Engine's or Apex's where one is
    installed, else `FusedAdamW`.

    For the rest of the process: the distributed optimizer asks at every save and load whether the step
    count lies in the parameter groups, as Apex keeps it, and so does `FusedAdamW`.
    """
    if issubclass(megatron_optimizer.Adam, PerParameterRates):
        return
    base: type = (
        FusedAdamW if megatron_optimizer.USING_PYTORCH_OPTIMIZER else megatron_optimizer.Adam
    )
    rated = type(f"Rated{base.__name__}", (PerParameterRates, base), {})
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    megatron_optimizer.Adam = rated
    distrib_optimizer.Adam = rated
    distrib_optimizer.HAVE_APEX_OR_TE = True
    if base is FusedAdamW:
        distrib_optimizer.USING_APEX_OPTIMIZER = True
