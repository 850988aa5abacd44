"""Differentiable functions written for eager CPU training; they are right on CUDA too.

Without a compiler every eager operation is one more trip through memory, and on two cores those
trips, not the matrix products, are what separates us from the hardware's speed. Each function here
therefore works on blocks of rows small enough to stay in the CPU's caches, writes its result once,
and saves for the backward pass only what cannot be cheaply computed again. bf16 inputs are computed
in fp32 inside a block, so no full fp32 copy of an activation ever exists. On CUDA a block is the
whole tensor.

Legend of shapes: s sequence, b micro-batch, h query heads, g KV heads (groups), r = h / g query
heads per group, e head width, f feed-forward width of this rank, d hidden width, v vocabulary
columns of this rank, n = s * b rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_BYTES = 1 << 23
"""Working set of one block of rows: stays in a few cores' share of the last cache, and is long enough
that two threads do not spend their time meeting each other."""


def _blocks(rows: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `rows` rows in cache-sized blocks on the CPU, in one block elsewhere."""
    if device.type != "cpu":
        step = rows
    else:
        step = max(16, _BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, rows, max(step, 1)):
        yield slice(start, min(start + step, rows))


def _wide(x: Tensor) -> Tensor:
    """`x` in the precision we compute in: fp32 for bf16 and fp16, itself otherwise (no copy)."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# --- SwiGLU --------------------------------------------------------------------------------------


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up with gate and up in one matrix; saves only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        flat = gate_up.reshape(-1, gate_up.shape[-1])  # [n, 2f]
        f = flat.shape[1] // 2
        out = flat.new_empty(flat.shape[0], f)
        for rows in _blocks(flat.shape[0], 3 * f * flat.element_size(), flat.device):
            torch.ops.aten.silu.out(flat[rows, :f], out=out[rows])
            out[rows].mul_(flat[rows, f:])
        ctx.save_for_backward(gate_up)
        return out.view(*gate_up.shape[:-1], f)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        flat = gate_up.reshape(-1, gate_up.shape[-1])
        f = flat.shape[1] // 2
        dy = d_out.reshape(-1, f)
        grad = torch.empty_like(flat)
        for rows in _blocks(flat.shape[0], 5 * f * flat.element_size(), flat.device):
            gate, up = flat[rows, :f], flat[rows, f:]
            d_gate, d_up = grad[rows, :f], grad[rows, f:]
            torch.ops.aten.silu.out(gate, out=d_up)
            d_up.mul_(dy[rows])
            torch.mul(dy[rows], up, out=d_gate)
            torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return grad.view_as(gate_up)


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU of Megatron's fused first MLP matrix.

    Args:
        gate_up: [..., 2f], the gate in the first f columns and the up projection in the last f (the
            layout of `linear_fc1`, also under tensor parallelism).

    Returns:
        silu(gate) * up, [..., f], contiguous.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return]


# --- RMSNorm -------------------------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    """x * rstd * weight with one number per row saved beside the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        d = x.shape[-1]
        flat = x.reshape(-1, d)
        w = _wide(weight)
        out = torch.empty_like(flat)
        rstd = flat.new_empty(flat.shape[0], 1, dtype=w.dtype)
        for rows in _blocks(flat.shape[0], 3 * d * w.element_size(), flat.device):
            block = _wide(flat[rows])
            norm = torch.linalg.vector_norm(block, dim=-1, keepdim=True)
            rstd[rows] = norm.square_().div_(d).add_(eps).rsqrt_()
            if block.dtype == out.dtype:
                torch.mul(block, rstd[rows], out=out[rows])
                out[rows].mul_(w)
            else:
                out[rows] = block.mul_(rstd[rows]).mul_(w)
        ctx.save_for_backward(x, weight, rstd)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        d = x.shape[-1]
        flat, dy_all, w = x.reshape(-1, d), d_out.reshape(-1, d), _wide(weight)
        dx = torch.empty_like(flat)
        dw = torch.zeros_like(w)
        for rows in _blocks(flat.shape[0], 4 * d * w.element_size(), flat.device):
            block, dy, r = _wide(flat[rows]), _wide(dy_all[rows]), rstd[rows]
            product = dy * block
            dw.addmv_(product.t(), r[:, 0])
            # dx = rstd * (dy * w) - x * rstd^3 * mean(dy * w * x)
            along_x = torch.mv(product, w)[:, None].mul_(r.pow(3)).div_(d)
            target = dx[rows] if block.dtype == dx.dtype else product
            torch.mul(dy, w, out=target)
            target.mul_(r).addcmul_(block, along_x, value=-1)
            if target is product:
                dx[rows] = product
        return dx.view_as(x), dw.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: [..., d]; statistics are taken in fp32 for bf16 inputs.
        weight: [d].
        eps: added to the mean square.

    Returns:
        [..., d] in the precision of `x`.

    Source: Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


# --- Rotary embedding ----------------------------------------------------------------------------


def rotate_into(x: Tensor, cos: Tensor, sin: Tensor, sign: float, out: Tensor) -> Tensor:
    """Rotate x [s, ..., e] by `sign` times the angle of its position into `out` (same shape, any
    strides)."""
    s, e = x.shape[0], x.shape[-1]
    half = e // 2
    ones = (1,) * (x.dim() - 2)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos = cos[:s, :half].to(wide).repeat(1, 2).view(s, *ones, e)
    sin = sin[:s, :half].to(wide).reshape(s, *ones, half)
    for rows in _blocks(s, 3 * cos.element_size() * (x.numel() // max(s, 1)), x.device):
        block = x[rows].to(wide)
        if out.dtype == wide:
            turned = torch.mul(block, cos[rows], out=out[rows])
        else:
            turned = block * cos[rows]
        turned[..., :half].addcmul_(block[..., half:], sin[rows], value=-sign)
        turned[..., half:].addcmul_(block[..., :half], sin[rows], value=sign)
        if out.dtype != wide:
            out[rows] = turned
    return out


class _Rotary(torch.autograd.Function):
    """Rotation of each pair (i, i + e/2); its gradient is the opposite rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_into(x, cos, sin, 1.0, x.new_empty(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_into(d_out, cos, sin, -1.0, d_out.new_empty(d_out.shape)), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in Llama's half-split layout (not the interleaved one).

    Args:
        x: [s, ..., e], for example [s, b, h, e]; any strides.
        cos: [s or more, e] (halves repeated, as Hugging Face and Megatron make them) or
            [s or more, e/2]; fp32 or fp64. bf16 inputs are rotated in fp32 and rounded once.
        sin: likewise.

    Returns:
        Contiguous tensor of the shape and precision of `x`.

    Source: Su et al., "RoFormer" (2021).
    """
    return _Rotary.apply(x, cos, sin)  # type: ignore[no-any-return]


# --- Cross-entropy over a vocabulary that is split over ranks ------------------------------------


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy from this rank's columns; saves the logits and a few numbers per row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first_id: int,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        reuse_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        n, columns = labels.numel(), logits.shape[-1]
        real = min(max(vocab_size - first_id, 0), columns)  # columns that are not padding
        flat, ids = logits.reshape(n, columns), labels.reshape(n)
        local = ids - first_id
        mine = (local >= 0) & (local < real)
        # Any column serves to read off the sum of exponentials; the label's is usually a large one.
        local = local.clamp(0, max(real - 1, 0))[:, None]
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        at_label = torch.zeros(n, 1, dtype=wide, device=logits.device)
        log_p = torch.full_like(at_label, float("-inf"))  # of that column among this rank's columns
        if real:
            at_label = flat.gather(1, local).to(wide)
            for rows in _blocks(n, 2 * real * at_label.element_size(), logits.device):
                block = torch.log_softmax(flat[rows, :real].to(wide), dim=-1)
                log_p[rows] = block.gather(1, local[rows])
        if group is None or dist.get_world_size(group) == 1:
            loss, log_z, share = -log_p[:, 0], (at_label - log_p)[:, 0], None
        else:
            log_sum = at_label - log_p if real else log_p
            at_label = at_label[:, 0] * mine
            loss, log_z, share = _combine(log_sum[:, 0], at_label, group)
        # A label outside the vocabulary has no probability: say so loudly, without waiting for the
        # device.
        loss = loss.masked_fill((ids < 0) | (ids >= vocab_size), float("nan"))
        ctx.save_for_backward(flat, local, mine, share)
        ctx.shape, ctx.real, ctx.reuse_logits, ctx.spent = logits.shape, real, reuse_logits, False
        return loss.view(labels.shape), log_z.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_loss: Tensor, d_log_z: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        if ctx.spent:
            raise RuntimeError("an earlier backward pass has overwritten the logits (reuse_logits)")
        ctx.spent = ctx.reuse_logits
        flat, local, mine, share = ctx.saved_tensors
        real, n = ctx.real, flat.shape[0]
        grad = flat.detach() if ctx.reuse_logits else torch.empty_like(flat)
        wide = d_loss.dtype
        at_label = torch.where(mine[:, None], -d_loss.reshape(n, 1), 0.0)
        # d loss / d logits = softmax - onehot, and d log_z / d logits = softmax.
        scale = (d_loss + d_log_z).reshape(n, 1)
        if share is not None:
            scale = scale * share[:, None]
        for rows in _blocks(n if real else 0, 2 * real * scale.element_size(), flat.device):
            p = torch.softmax(flat[rows, :real].to(wide), dim=-1)
            d_logits = torch.mul(p, scale[rows], out=grad[rows, :real] if grad.dtype == wide else p)
            d_logits.scatter_add_(1, local[rows], at_label[rows])
            if d_logits is p:
                grad[rows, :real] = p
        grad[:, real:] = 0.0
        return grad.view(ctx.shape), None, None, None, None, None


def _combine(
    log_sum: Tensor, at_label: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss per row, log-sum-exp over all ranks, and this rank's share of the softmax.

    Args:
        log_sum: [n], log-sum-exp of this rank's columns, -inf on a rank that holds only padding.
        at_label: [n], the label's logit on the rank that holds it, else 0.
        group: ranks that hold the other columns.
    """
    peak = log_sum.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    share = (log_sum - peak).exp_()
    sums = torch.stack((share, at_label))
    dist.all_reduce(sums, group=group)
    log_z = sums[0].log().add_(peak)
    return log_z - sums[1], log_z, share.div_(sums[0])


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    first_id: int = 0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    reuse_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every token, from logits whose columns are split over the ranks of `group`.

    Columns of ids at or beyond `vocab_size` are padding: they take no part in the softmax and get
    zero gradient, so the loss does not depend on how far the vocabulary was padded nor on the
    number of ranks. One rank may hold nothing but padding. Equal to `F.cross_entropy` on the full
    unpadded logits. The device is never waited for.

    Args:
        logits: [s, b, v] (or any leading shape), this rank's columns; bf16 is summed in fp32.
        labels: [s, b] token ids of the whole vocabulary. A label outside 0..vocab_size-1 gives a
            loss of NaN.
        first_id: token id of this rank's first column.
        vocab_size: number of token ids of the whole vocabulary, padding not counted.
        group: the tensor-parallel ranks, None for one rank.
        reuse_logits: write the gradient over the logits in the backward pass, which saves a tensor
            of their size. Only right when nothing else reads the logits after this call, and
            backward runs once.

    Returns:
        Loss in nats, and the logarithm of the softmax's denominator (log-sum-exp of the logits), each
        [s, b], fp32 (fp64 for fp64 logits). Both can be differentiated.
    """
    return _VocabParallelCrossEntropy.apply(  # type: ignore[no-any-return]
        logits, labels, first_id, vocab_size, group, reuse_logits
    )
