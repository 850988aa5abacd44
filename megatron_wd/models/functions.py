"""Temporary plain versions (to be replaced)."""
import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(x):
    g, u = x.chunk(2, -1)
    return F.silu(g) * u


def split_qkv_rotary(packed, *, num_groups, head_dim, angles):
    s, b, _ = packed.shape
    x = packed.view(s, b, num_groups, -1, head_dim)
    n = x.shape[3] - 2
    q = x[:, :, :, :n].reshape(s, b, num_groups * n, head_dim)
    k, v = x[:, :, :, n], x[:, :, :, n + 1]
    ang = angles.reshape(s, 1, 1, head_dim)
    cos, sin = ang.cos(), ang.sin()

    def rot(t):
        a, c = t.chunk(2, -1)
        return (t * cos + torch.cat((-c, a), -1) * sin).to(t.dtype)

    return rot(q).permute(1, 2, 0, 3), rot(k).permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def causal_attention(q, k, v, dropout=0.0):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=dropout)


def vocab_parallel_cross_entropy(logits, labels, *, first_id, vocab_size, group):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as ce
    n = logits.shape[-1]
    if first_id + n > vocab_size:
        mask = torch.arange(first_id, first_id + n) >= vocab_size
        logits = logits.float().masked_fill(mask, -1e30)
    return ce(logits, labels.contiguous())
