"""AdamH: Adam's direction, steps of a fixed length relative to the matrix, and a fixed norm.

    u = m_hat / (sqrt(v_hat) + eps)
    W <- R N(W - lr R N(u)),   N(X) = X / ||X||_F,   R = ||W_0||_F,   no weight decay

so that lr is the effective learning rate, but for how far u is from a right angle to W. A matrix is one that
the model multiplies by: query, key and value apart, and gate and up. Norms are over all ranks that hold a
part of it.

Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization",
arXiv 2606.16899.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wd.config import ModelConfig
from megatron_wd.optim.matrices import (
    Master,
    Matrix,
    MatrixSums,
    Piece,
    cut_into_pieces,
)

if TYPE_CHECKING:
    from megatron_wd.optim.rules import Rates

_BLOCK_VALUES = 1 << 17
"""Values of a block: weight, gradient, two means and the direction stay in the caches between its passes."""
_NORM_FLOOR = 1e-10
"""A direction shorter than this moves nothing, as where no gradient has come yet."""


class Hyperball:
    """The matrices of this rank that keep their norms.

    Attributes:
        matrices: all matrices of the model, in the order of their numbers.
        radii: norm that each matrix keeps, float64 [matrices].
    """

    def __init__(self, masters: list[Master], matrices: list[Matrix], model: ModelConfig) -> None:
        """Takes the norms that the matrices have now. Collective.

        Args:
            masters: master weights of hidden matrices on this rank.
            matrices: all matrices of the model.
            model: the model.
        """
        self._masters, self.matrices = masters, matrices
        self._device = masters[0].weight.device if masters else torch.device("cpu")
        self._pieces = cut_into_pieces(masters, matrices, model, _BLOCK_VALUES)
        squares = MatrixSums(1, len(matrices), self._device)
        for piece in self._pieces:
            if masters[piece.master].is_counted:
                weight = piece.of(masters[piece.master].weight.detach().view(-1))
                squares.add(piece, torch.dot(weight, weight))
        self.radii = squares.over_ranks()[0].sqrt()

    def named_radii(self) -> dict[str, float]:
        """The radii by matrix, for a checkpoint."""
        found = zip(self.matrices, self.radii.tolist(), strict=True)
        return {matrix.name: radius for matrix, radius in found if matrix.is_hidden}

    def set_radii(self, radii: Mapping[str, float]) -> None:
        """Goes on with the radii of a checkpoint."""
        values = [radii.get(matrix.name, 0.0) for matrix in self.matrices]
        self.radii = torch.tensor(values, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def step(
        self, state: dict[Tensor, Any], group: dict[str, Any], rates_of: Callable[[Tensor], Rates]
    ) -> None:
        """One step of every matrix; the gradients are used up. Collective.

        Args:
            state: Adam's means by parameter.
            group: betas, eps and the number of this step, from 1.
            rates_of: the rates of a parameter.
        """
        sums = MatrixSums(3, len(self.matrices), self._device)
        lr = torch.zeros_like(self.radii)
        rates = [rates_of(master.weight).lr for master in self._masters]
        scratch = torch.empty(_BLOCK_VALUES, device=self._device)
        count = torch.tensor(float(group["step"]), device=self._device)
        for piece in self._pieces:
            master = self._masters[piece.master]
            weight = piece.of(master.weight.view(-1))
            direction = scratch[: piece.last - piece.first].zero_()
            self._descend(piece, direction, state[master.weight], group, count)
            lr[piece.matrix] = rates[piece.master]
            if master.is_counted:
                squares, dots = torch.dot(direction, direction), torch.dot(direction, weight)
                sums.add(piece, squares, dots, torch.dot(weight, weight))
        length, scale = (values.tolist() for values in self._coefficients(sums.over_ranks(), lr))
        for piece in self._pieces:
            master, number = self._masters[piece.master], piece.matrix
            weight = piece.of(master.weight.view(-1))
            direction = piece.of(_gradient(master))  # where `_descend` has left it
            weight.mul_(scale[number]).add_(direction, alpha=scale[number] * length[number])

    def _descend(
        self,
        piece: Piece,
        direction: Tensor,
        means: dict[str, Tensor],
        group: dict[str, Any],
        count: Tensor,
    ) -> None:
        """Adam's step of length one for a piece, -u, into `direction` (zeros) and in place of the
        gradient."""
        master = self._masters[piece.master]
        if not means:
            means["exp_avg"] = torch.zeros_like(master.weight)
            means["exp_avg_sq"] = torch.zeros_like(master.weight)
        gradient = piece.of(_gradient(master))
        # torch's fused kernel moves a weight of zero, at rate one, by Adam's direction.
        torch._fused_adamw_(  # type: ignore[attr-defined]
            [direction],
            [gradient],
            [piece.of(means["exp_avg"].view(-1))],
            [piece.of(means["exp_avg_sq"].view(-1))],
            [],
            [count],
            lr=1.0,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        gradient.copy_(direction)

    def _coefficients(self, sums: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """From d.d, d.w and w.w of each matrix: c and s with W <- s (W + c d), of norm R."""
        squares, dots, weights = sums
        norm = squares.sqrt()
        length = torch.where(norm > _NORM_FLOOR, lr * self.radii / norm.clamp(min=_NORM_FLOOR), 0.0)
        moved = (weights + 2.0 * length * dots + length.square() * squares).clamp(min=0.0).sqrt()
        scale = torch.where(moved > 0.0, self.radii / moved.clamp(min=_NORM_FLOOR), 1.0)
        return length, scale


def _gradient(master: Master) -> Tensor:
    """The gradient of a master weight, flat."""
    gradient = master.weight.grad
    assert gradient is not None, f"{master.parameter} has no gradient"
    return gradient.view(-1)
