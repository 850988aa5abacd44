"""What one step does to every matrix: norms, effective learning rate, the decay's share, and the
equilibrium that rate and decay lead to.

Everything is a sum over a matrix of fp32 master weights, taken on each rank for its part and added up over
ranks, so the numbers do not depend on the layout. The effective rate is the length of the difference
between the weight's direction before and after the step, taken value by value.

Sources: the effective rate as in "On the Nonlinearity of Learning Rate Scaling for LLM Training", arXiv
2606.29158; equilibrium and relaxation from W <- (1 - d) W - a, and the part that momentum has in them as in
Kosson et al., "Rotational Equilibrium", arXiv 2305.17212.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_wd.config import ModelConfig
from megatron_wd.optim.matrices import (
    Master,
    Matrix,
    MatrixSums,
    cut_into_pieces,
)
from megatron_wd.optim.rules import Rates

_BLOCK_VALUES = 1 << 17


@dataclass(frozen=True)
class StepMeasures:
    """One step, by matrix: float64 [matrices] each, the same on every rank.

    Attributes:
        weight_norm: Frobenius norm after the step.
        gradient_norm: of the gradient, before clipping.
        update_norm: of the whole change, ||W' - W||.
        effective_lr: || W'/||W'|| - W/||W|| ||.
        joint_effective_lr: the matrix's share of the effective rate of all hidden matrices as one
            vector; its squares add up to the square of that.
        decay: d, the part of the weight that decayed in this step.
        decay_share: ||d W|| / (||d W|| + ||W' - (1 - d) W||).
        equilibrium_norm: sqrt(c) ||W' - (1 - d) W|| / sqrt(d (2 - d)), where the norm stops changing at
            this rate and decay if gradients are at right angles to the weight and to each other;
            c = (1 + beta1) / (1 - beta1), since momentum makes successive steps alike. Infinite without
            decay.
        equilibrium_effective_lr: sqrt(2 d / c), the effective rate there; under AdamH the rate itself.
    """

    weight_norm: Tensor
    gradient_norm: Tensor
    update_norm: Tensor
    effective_lr: Tensor
    joint_effective_lr: Tensor
    decay: Tensor
    decay_share: Tensor
    equilibrium_norm: Tensor
    equilibrium_effective_lr: Tensor


class StepMeter:
    """Measures a step from its two sides: `before` the update and `after` it."""

    def __init__(
        self, masters: list[Master], matrices: list[Matrix], config: ModelConfig, beta1: float
    ) -> None:
        """Finds the parts of all matrices on this rank.

        Args:
            masters: this rank's master weights.
            matrices: all matrices of the model.
            config: the model's shape.
            beta1: Adam's momentum.
        """
        self._likeness = (1.0 + beta1) / (1.0 - beta1)
        self.matrices = matrices
        self._masters = [master for master in masters if master.is_counted]
        self._device = self._masters[0].weight.device if self._masters else torch.device("cpu")
        self._pieces = cut_into_pieces(self._masters, matrices, config, _BLOCK_VALUES)
        hidden = [matrix.is_hidden for matrix in matrices]
        self._hidden = torch.tensor(hidden, device=self._device)
        self._before: list[Tensor] = []
        self._sums = self._start(2)

    def _start(self, num_values: int) -> MatrixSums:
        return MatrixSums(num_values, len(self.matrices), self._device)

    @torch.no_grad()
    def before(self) -> None:
        """Keeps the weights, and takes their norms and those of the gradients."""
        self._sums = self._start(2)
        self._before = [torch.empty_like(m.weight.view(-1)) for m in self._masters]
        zero = torch.zeros((), device=self._device)
        for piece in self._pieces:
            master = self._masters[piece.master]
            weight = piece.of(master.weight.view(-1))
            piece.of(self._before[piece.master]).copy_(weight)
            gradient = master.weight.grad
            if gradient is not None:
                gradient = piece.of(gradient.view(-1))
            squares = zero if gradient is None else torch.dot(gradient, gradient)
            self._sums.add(piece, torch.dot(weight, weight), squares)

    @torch.no_grad()
    def after(self, rates_of: Callable[[Tensor], Rates]) -> StepMeasures:
        """Compares with the weights before, and lets go of those. Collective.

        Args:
            rates_of: what the step did to a master weight.
        """
        sums = self._start(3)
        for piece in self._pieces:
            new = piece.of(self._masters[piece.master].weight.view(-1))
            old = piece.of(self._before[piece.master])
            update = new - old
            sums.add(piece, torch.dot(new, new), torch.dot(update, update), torch.dot(update, old))
        old_squares, gradient_squares = self._sums.over_ranks()
        new_squares, update_squares, along = sums.over_ranks()
        decay, fixed_lr = self._rates(rates_of)
        turned, jointly = self._turned(old_squares, new_squares)
        descent = update_squares + 2.0 * decay * along + decay.square() * old_squares
        descent, lost = descent.clamp(min=0.0).sqrt(), decay * old_squares.sqrt()
        self._before = []
        measures = StepMeasures(
            weight_norm=new_squares.sqrt(),
            gradient_norm=gradient_squares.sqrt(),
            update_norm=update_squares.sqrt(),
            effective_lr=turned,
            joint_effective_lr=jointly,
            decay=decay,
            decay_share=lost / (lost + descent).clamp(min=1e-300),
            equilibrium_norm=descent * (self._likeness / (decay * (2.0 - decay))).sqrt(),
            equilibrium_effective_lr=(2.0 * decay / self._likeness).sqrt() + fixed_lr,
        )
        return StepMeasures(**{name: value.cpu() for name, value in vars(measures).items()})

    def _turned(self, old_squares: Tensor, new_squares: Tensor) -> tuple[Tensor, Tensor]:
        """Lengths of the differences of directions: of each matrix, and of its part of the one vector
        of all hidden matrices."""

        def inverse(squares: Tensor) -> Tensor:
            return torch.where(squares > 0.0, squares.rsqrt(), 0.0)

        old, new = inverse(old_squares), inverse(new_squares)
        joint_old = inverse((old_squares * self._hidden).sum()) * self._hidden
        joint_new = inverse((new_squares * self._hidden).sum()) * self._hidden
        sums = self._start(2)
        each, joint = (
            [(float(a), float(b)) for a, b in zip(*pair, strict=True)]
            for pair in ((old, new), (joint_old, joint_new))
        )
        for piece in self._pieces:
            before = piece.of(self._before[piece.master])
            after = piece.of(self._masters[piece.master].weight.view(-1))
            turned = []
            for inverses in (each, joint):
                a, b = inverses[piece.matrix]
                difference = (after * b).sub_(before, alpha=a)
                turned.append(torch.dot(difference, difference))
            sums.add(piece, *turned)
        of_each, of_all = sums.over_ranks().sqrt()
        return of_each, of_all

    def _rates(self, rates_of: Callable[[Tensor], Rates]) -> tuple[Tensor, Tensor]:
        """Decay of every matrix, and the rate of those of AdamH: the same on each rank that holds one."""
        sums = self._start(3)
        for piece in self._pieces:
            rates = rates_of(self._masters[piece.master].weight)
            fixed_lr = rates.lr if rates.is_hyperball else 0.0
            values = torch.tensor((rates.decayed, fixed_lr, 1.0), dtype=torch.float64)
            sums.add(piece, *values.to(self._device))
        decay, fixed_lr, holders = sums.over_ranks()
        return decay / holders.clamp(min=1.0), fixed_lr / holders.clamp(min=1.0)
