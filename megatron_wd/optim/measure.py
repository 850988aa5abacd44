"""What one step does to every matrix: norms, effective learning rate, the decay's share, and the
equilibrium that rate and decay lead to.

Everything is a sum over a matrix of fp32 master weights, taken on each rank for its part and added up over
ranks, so the numbers do not depend on the layout. The effective rate is the length of the difference
between the weight's direction before and after the step, taken value by value.

Sources: the effective rate as in "On the Nonlinearity of Learning Rate Scaling for LLM Training", arXiv
2606.29158; equilibrium norm and relaxation from W <- (1 - d) W - a with a at a right angle to W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megatron_wd.config import ModelConfig
from megatron_wd.optim.matrices import (
    Matrix,
    add_rows,
    cut_into_pieces,
    master_weights,
    sum_over_ranks,
)

_BLOCK_VALUES = 1 << 18


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
        equilibrium_norm: ||W' - (1 - d) W|| / sqrt(d (2 - d)), where the norm stops changing at this
            rate and decay if steps are at right angles to the weight; infinite without decay.
        equilibrium_effective_lr: sqrt(2 d), the effective rate there.
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
        self,
        model: list[nn.Module],
        optimizer: MegatronOptimizer,
        matrices: list[Matrix],
        config: ModelConfig,
    ) -> None:
        """Finds the parts of all matrices on this rank.

        Args:
            model: this rank's chunks.
            optimizer: Megatron's optimizer over them.
            matrices: all matrices of the model.
            config: the model's shape.
        """
        self.matrices = matrices
        self._masters = [m for m in master_weights(model, optimizer) if m.is_counted]
        device = self._masters[0].weight.device if self._masters else torch.device("cpu")
        self._pieces = cut_into_pieces(self._masters, matrices, config, _BLOCK_VALUES, device)
        hidden = [matrix.is_hidden for matrix in matrices]
        self._hidden = torch.tensor(hidden, device=device)
        self._before: list[Tensor] = []
        self._squares: Tensor | None = None

    def _sums(self, count: int) -> Tensor:
        return torch.zeros(
            count, len(self.matrices), dtype=torch.float64, device=self._hidden.device
        )

    @torch.no_grad()
    def before(self) -> None:
        """Keeps the weights, and takes their norms and those of the gradients."""
        sums = self._sums(2)
        if not self._before:
            self._before = [torch.empty_like(m.weight.view(-1)) for m in self._masters]
        for piece in self._pieces:
            master = self._masters[piece.master]
            weight = piece.of(master.weight.view(-1))
            piece.of(self._before[piece.master]).copy_(weight)
            add_rows(sums[0], piece, _row_squares(weight))
            gradient = master.weight.grad
            if gradient is not None:
                add_rows(sums[1], piece, _row_squares(piece.of(gradient.view(-1))))
        self._squares = sums

    @torch.no_grad()
    def after(self, decay_of: Callable[[Tensor], float]) -> StepMeasures:
        """Compares with the weights before. Collective.

        Args:
            decay_of: the part of a master weight that decayed in this step, d.
        """
        assert self._squares is not None, "before() comes first"
        sums = torch.cat((self._squares, self._sums(4)))
        old_squares, gradient_squares, new_squares, update_squares, along, decay = sums
        for piece in self._pieces:
            master = self._masters[piece.master]
            new = piece.of(master.weight.view(-1))
            old = piece.of(self._before[piece.master])
            update = new - old
            add_rows(new_squares, piece, _row_squares(new))
            add_rows(update_squares, piece, _row_squares(update))
            add_rows(along, piece, (update * old).sum(dim=1))
            decay[piece.matrix] = decay_of(master.weight)
        owners = self._sums(1)[0]
        for piece in self._pieces:
            owners[piece.matrix] = 1.0
        sums = sum_over_ranks(torch.cat((sums, owners[None])))
        old_squares, gradient_squares, new_squares, update_squares, along, decay, owners = sums
        decay = decay / owners.clamp(min=1.0)
        turned, jointly = self._turned(old_squares, new_squares)
        descent = update_squares + 2.0 * decay * along + decay.square() * old_squares
        descent, lost = descent.clamp(min=0.0).sqrt(), decay * old_squares.sqrt()
        return StepMeasures(
            weight_norm=new_squares.sqrt(),
            gradient_norm=gradient_squares.sqrt(),
            update_norm=update_squares.sqrt(),
            effective_lr=turned,
            joint_effective_lr=jointly,
            decay=decay,
            decay_share=lost / (lost + descent).clamp(min=1e-300),
            equilibrium_norm=descent / (decay * (2.0 - decay)).sqrt(),
            equilibrium_effective_lr=(2.0 * decay).sqrt(),
        )

    def _turned(self, old_squares: Tensor, new_squares: Tensor) -> tuple[Tensor, Tensor]:
        """Lengths of the differences of directions: of each matrix, and of its part of the one vector
        of all hidden matrices."""

        def inverse(squares: Tensor) -> Tensor:
            return torch.where(squares > 0.0, squares.rsqrt(), 0.0).float()

        old, new = inverse(old_squares), inverse(new_squares)
        joint_old = inverse((old_squares * self._hidden).sum()) * self._hidden
        joint_new = inverse((new_squares * self._hidden).sum()) * self._hidden
        sums = self._sums(2)
        for piece in self._pieces:
            before = piece.of(self._before[piece.master])
            after = piece.of(self._masters[piece.master].weight.view(-1))
            for into, a, b in ((sums[0], old, new), (sums[1], joint_old, joint_new)):
                difference = after * b[piece.matrix, None]
                difference.addcmul_(before, a[piece.matrix, None], value=-1.0)
                add_rows(into, piece, _row_squares(difference))
        each, joint = sum_over_ranks(sums).sqrt()
        return each, joint


def _row_squares(x: Tensor) -> Tensor:
    """Sum of squares of each row: [rows, columns] -> [rows]."""
    return torch.linalg.vector_norm(x, dim=1).square()
