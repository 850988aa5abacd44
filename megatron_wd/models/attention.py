"""Causal self-attention for where Transformer Engine is not: torch's kernel on CUDA, our own blocks
on the CPU.

torch's CPU kernel multiplies tiles too small for the vector units. Here the query heads that share
a KV head are stacked into one taller matrix; queries go in blocks that see only the keys up to
their own end, so little above the diagonal is computed; and the probabilities are kept for the
backward pass while they are small. At length 512 forward and backward take 0.6 (fp32) and 0.35
(bf16) of the time of `scaled_dot_product_attention` on AVX-512 cores. In bf16 the scores are
rounded to bf16 before the softmax, as in every attention that is not fused.

Legend: s sequence, b micro-batch, g KV heads (groups), r query heads per group, h = g * r, e head
width, G = b * g, and a block of B positions holds B * r rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wd.models.functions import apply_rotary, rotate_into

_BLOCK_POSITIONS = 128
"""Query positions of one block."""
_WORK_BYTES = 1 << 20
"""Scores of one matrix product: about what the second-level caches hold."""
_KEEP_BYTES = 1 << 26
"""Probabilities of one call are kept for its backward pass up to this size, and computed again
beyond it."""


def _above_diagonal(positions: int, r: int, like: Tensor) -> Tensor:
    """-inf where a query of a diagonal block would see a later key: [positions * r, positions]."""
    mask = torch.full((positions, positions), float("-inf"), dtype=like.dtype).triu_(1)
    return mask.repeat_interleave(r, dim=0)


def _query_blocks(s: int) -> list[tuple[int, int]]:
    """First and last+1 position of each query block."""
    return [(i, min(i + _BLOCK_POSITIONS, s)) for i in range(0, s, _BLOCK_POSITIONS)]


def _group_blocks(count: int, matrix_bytes: int) -> list[slice]:
    """Groups that are multiplied together, so that their scores stay in the cache."""
    step = max(1, min(count, _WORK_BYTES // max(matrix_bytes, 1)))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def _seen(keys: Tensor, last: int) -> Tensor:
    """The keys (or values) before a position, [G, last, e], dense: the bf16 matrix product would
    else copy each transposed, entry by entry."""
    return keys[:, :last].contiguous()


def _probabilities(q: Tensor, k: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """Softmax of scaled queries [*, rows, e] on keys [*, n, e]; the last columns are the diagonal
    block."""
    scores = torch.bmm(q, k.transpose(1, 2))
    scores[..., -mask.shape[1] :] += mask
    if out is None:
        out = torch.empty_like(scores)
    torch.softmax(scores, dim=-1, out=out)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Attention of grouped tensors.

    Args:
        q: [G, s * r, e], position-major rows, already scaled by 1/sqrt(e).
        k: [G, s, e].
        v: [G, s, e].

    Returns:
        Output like `q`, and per query block the kept probabilities [G, B * r, n] (no tensors when
        not kept).
    """
    G, s = k.shape[:2]
    r = q.shape[1] // s
    out, kept = torch.empty_like(q), []
    keep = G * s * r * s * q.element_size() // 2 <= _KEEP_BYTES
    for first, last in _query_blocks(s):
        rows = slice(first * r, last * r)
        mask = _above_diagonal(last - first, r, q)
        block = q.new_empty(G, rows.stop - rows.start, last) if keep else None
        kn, vn = _seen(k, last), _seen(v, last)
        for part in _group_blocks(G, (rows.stop - rows.start) * last * q.element_size()):
            into = block[part] if block is not None else None
            p = _probabilities(q[part, rows], kn[part], mask, into)
            out[part, rows] = torch.bmm(p, vn[part])
        if block is not None:
            kept.append(block)
    return out, kept


def _attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scaled q, k and v, shaped like them; key gradients are added up in fp32."""
    G, s = k.shape[:2]
    r = q.shape[1] // s
    sums = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(k.shape, dtype=sums) for _ in range(2))
    for index, (first, last) in enumerate(_query_blocks(s)):
        rows = slice(first * r, last * r)
        mask = _above_diagonal(last - first, r, q)
        kn, vn = _seen(k, last), _seen(v, last)
        for part in _group_blocks(G, (rows.stop - rows.start) * last * q.element_size()):
            qb, dob, kb = q[part, rows], d_out[part, rows], kn[part]
            p = kept[index][part] if kept else _probabilities(qb, kb, mask)
            dp = torch.bmm(dob, vn[part].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)  # type: ignore[attr-defined]
            dq[part, rows] = torch.bmm(ds, kb)
            if sums == q.dtype:
                dv[part, :last].baddbmm_(p.transpose(1, 2), dob)
                dk[part, :last].baddbmm_(ds.transpose(1, 2), qb)
            else:
                dv[part, :last] += torch.bmm(p.transpose(1, 2), dob)
                dk[part, :last] += torch.bmm(ds.transpose(1, 2), qb)
    return dq, dk, dv


class _BlockedAttention(torch.autograd.Function):
    """Causal attention of q [s, b, h, e] with k, v [s, b, g, e] on the CPU, giving [s, b, h *
    e]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, b, h, e = q.shape
        g = k.shape[2]
        grouped = q.new_empty(b, g, s, h // g, e)
        torch.mul(q.view(s, b, g, h // g, e), e**-0.5, out=grouped.permute(2, 0, 1, 3, 4))
        q = grouped.view(b * g, -1, e)
        k, v = (_to_groups(x, s, b, g, 1, e) for x in (k, v))
        out, kept = _attend(q, k, v)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.layout = (s, b, g, h // g, e)
        return _from_groups(out, *ctx.layout).reshape(s, b, h * e)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *kept = ctx.saved_tensors
        s, b, g, r, e = ctx.layout
        dq, dk, dv = _attend_backward(_to_groups(d_out, s, b, g, r, e), q, k, v, kept)
        dq = _from_groups(dq.mul_(e**-0.5), s, b, g, r, e).reshape(s, b, g * r, e)
        dk, dv = (x.view(b, g, s, e).permute(2, 0, 1, 3).to(q.dtype) for x in (dk, dv))
        return dq, dk, dv


class _PackedAttention(torch.autograd.Function):
    """Rotary embedding and causal attention straight from Megatron's packed projection, on the
    CPU."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, g: int, e: int) -> Tensor:
        s, b = qkv.shape[:2]
        packed = qkv.view(s, b, g, -1, e)  # per group r queries, one key, one value
        r = packed.shape[3] - 2
        scale = e**-0.5  # folded into the rotation of the queries
        q, k = qkv.new_empty(b * g, s * r, e), qkv.new_empty(b * g, s, e)
        rotate_into(
            packed[..., :r, :], cos * scale, sin * scale, 1.0, _from_groups(q, s, b, g, r, e)
        )
        rotate_into(packed[..., r : r + 1, :], cos, sin, 1.0, _from_groups(k, s, b, g, 1, e))
        v = _to_groups(packed[..., r + 1, :], s, b, g, 1, e)
        out, kept = _attend(q, k, v)
        ctx.save_for_backward(q, k, v, cos, sin, *kept)
        ctx.layout = (s, b, g, r, e)
        return _from_groups(out, *ctx.layout).reshape(s, b, g * r * e)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None, None]:
        q, k, v, cos, sin, *kept = ctx.saved_tensors
        s, b, g, r, e = ctx.layout
        dq, dk, dv = _attend_backward(_to_groups(d_out, s, b, g, r, e), q, k, v, kept)
        grad = d_out.new_empty(s, b, g, r + 2, e)
        scale = e**-0.5
        dq, dk, dv = (_from_groups(x, s, b, g, n, e) for x, n in ((dq, r), (dk, 1), (dv, 1)))
        rotate_into(dq, cos * scale, sin * scale, -1.0, grad[..., :r, :])
        rotate_into(dk, cos, sin, -1.0, grad[..., r : r + 1, :])
        grad[..., r + 1 :, :] = dv
        return grad.view(s, b, -1), None, None, None, None


def _to_groups(x: Tensor, s: int, b: int, g: int, r: int, e: int) -> Tensor:
    """[s, b, g * r * e] (or split further) -> contiguous [b * g, s * r, e]."""
    return x.reshape(s, b, g, r, e).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, e).contiguous()


def _from_groups(x: Tensor, s: int, b: int, g: int, r: int, e: int) -> Tensor:
    """[b * g, s * r, e] -> a view [s, b, g, r, e]."""
    return x.view(b, g, s, r, e).permute(2, 0, 1, 3, 4)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Causal scaled-dot-product attention in Megatron's layout, with fewer KV heads than heads if
    wanted.

    Args:
        q: [s, b, h, e], rotary already applied; consecutive h / g heads share a KV head.
        k: [s, b, g, e].
        v: [s, b, g, e].
        dropout_p: probability of dropping an attention weight; the caller seeds and forks the
            generator.

    Returns:
        [s, b, h * e], contiguous.
    """
    if q.device.type == "cpu" and dropout_p == 0.0:
        return _BlockedAttention.apply(q, k, v)  # type: ignore[no-any-return]
    s, b, h, e = q.shape
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=h != k.shape[1]
    )
    return out.permute(2, 0, 1, 3).reshape(s, b, h * e)


def packed_causal_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, num_groups: int, head_dim: int, dropout_p: float = 0.0
) -> Tensor:
    """Rotary embedding, then causal attention, from the output of Megatron's `linear_qkv`.

    Args:
        qkv: [s, b, g * (r + 2) * e], per KV head its r query heads, its key and its value.
        cos: rotary table as for `apply_rotary`: [s, e] or [s, e/2], fp32.
        sin: likewise.
        num_groups: g, KV heads on this rank.
        head_dim: e.
        dropout_p: as for `causal_attention`.

    Returns:
        [s, b, h * e], contiguous; its gradient arrives in one tensor packed like `qkv`.
    """
    s, b, e = *qkv.shape[:2], head_dim
    if qkv.device.type == "cpu" and dropout_p == 0.0:
        return _PackedAttention.apply(qkv, cos, sin, num_groups, e)  # type: ignore[no-any-return]
    packed = qkv.view(s, b, num_groups, -1, e)
    q, k, v = packed.split([packed.shape[3] - 2, 1, 1], dim=3)
    q, k = apply_rotary(q, cos, sin).view(s, b, -1, e), apply_rotary(k, cos, sin)
    return causal_attention(q, k.view(s, b, -1, e), v.squeeze(3), dropout_p)
