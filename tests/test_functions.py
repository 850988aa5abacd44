"""The functions for eager CPU training give what the textbook formulas give, gradients too."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from megatron_wd.models import attention, functions

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks far smaller than the tests' tensors, so that every test crosses their borders."""
    monkeypatch.setattr(functions, "_BLOCK_BYTES", 2048)
    monkeypatch.setattr(attention, "_BLOCK_POSITIONS", 5)
    monkeypatch.setattr(attention, "_WORK_BYTES", 1024)
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE).to(dtype).requires_grad_()


def difference(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor
) -> float:
    """Largest relative error of output and gradients, the reference being computed in fp64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, want = ours(*inputs), reference(*exact)
    d_out = torch.randn_like(want)
    grads = torch.autograd.grad(out, inputs, d_out.to(out.dtype))
    wanted = torch.autograd.grad(want, exact, d_out.to(out.dtype).double())
    pairs = zip((out, *grads), (want, *wanted), strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def reference_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def reference_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def tables(s: int, e: int) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(s).double(), 10000.0 ** (-torch.arange(e // 2) / (e // 2)))
    return angle.cos().float(), angle.sin().float()


def reference_rotary(x: Tensor) -> Tensor:
    """Llama's rotation through complex numbers: pairs are (i, i + e/2)."""
    cos, sin = (t.double() for t in tables(x.shape[0], x.shape[-1]))
    turn = torch.complex(cos, sin).view(x.shape[0], 1, 1, -1)
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax of masked scores, written out, KV heads repeated: [s, b, h * e]."""
    s, b, h, e = q.shape
    k, v = (x.repeat_interleave(h // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhe,tbhe->bhst", q, k) / math.sqrt(e)
    scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
    return torch.einsum("bhst,tbhe->sbhe", scores.softmax(-1), v).reshape(s, b, h * e)


def unpack(qkv: Tensor, g: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    packed = qkv.view(*qkv.shape[:2], g, -1, e)
    return packed[..., :-2, :].flatten(2, 3), packed[..., -2, :], packed[..., -1, :]


def reference_packed(qkv: Tensor, g: int, e: int) -> Tensor:
    q, k, v = unpack(qkv, g, e)
    return reference_attention(reference_rotary(q), reference_rotary(k), v)


PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"]
)


@PRECISIONS
def test_swiglu(dtype: torch.dtype, tolerance: float) -> None:
    assert difference(functions.swiglu, reference_swiglu, randn(37, 3, 32, dtype=dtype)) < tolerance


@PRECISIONS
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    inputs = randn(37, 3, 24, dtype=dtype), randn(24, dtype=dtype)
    assert (
        difference(lambda x, w: functions.rms_norm(x, w, 1e-3), reference_norm, *inputs) < tolerance
    )


@PRECISIONS
@pytest.mark.parametrize("repeated", [False, True], ids=["half tables", "full tables"])
def test_rotary(dtype: torch.dtype, tolerance: float, repeated: bool) -> None:
    cos, sin = (t.repeat(1, 2) if repeated else t for t in tables(40, 8))
    strided = randn(31, 2, 3, 24, dtype=dtype)[..., 8:16].detach().requires_grad_()
    error = difference(lambda x: functions.apply_rotary(x, cos, sin), reference_rotary, strided)
    assert error < tolerance


@PRECISIONS
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20], ids=["recomputed", "kept"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_attention(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    tolerance: float,
    keep_bytes: int,
    heads: int,
    groups: int,
) -> None:
    monkeypatch.setattr(attention, "_KEEP_BYTES", keep_bytes)
    inputs = [randn(23, 2, n, 8, dtype=dtype) for n in (heads, groups, groups)]
    assert difference(attention.causal_attention, reference_attention, *inputs) < tolerance
    qkv = randn(23, 2, (heads + 2 * groups) * 8, dtype=dtype)
    cos, sin = tables(23, 8)

    def ours(x: Tensor) -> Tensor:
        return attention.packed_causal_attention(x, cos, sin, num_groups=groups, head_dim=8)

    assert difference(ours, lambda x: reference_packed(x, groups, 8), qkv) < tolerance


def test_attention_through_torchs_kernel_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The road that CUDA takes, on the CPU: dropout of almost nothing leads there."""
    qkv, (cos, sin) = randn(23, 2, 10 * 8, dtype=torch.float32), tables(23, 8)
    outs = [
        attention.packed_causal_attention(
            qkv, cos, sin, num_groups=2, head_dim=8, dropout_p=dropout_p
        )
        for dropout_p in (0.0, 1e-12)
    ]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)


def test_gradients_in_double_precision() -> None:
    check = torch.autograd.gradcheck
    assert check(functions.swiglu, randn(9, 2, 8))
    assert check(lambda x, w: functions.rms_norm(x, w, 1e-5), (randn(9, 2, 6), randn(6)))
    labels = torch.randint(11, (9, 2))
    assert check(
        lambda x: functions.vocab_parallel_cross_entropy(x, labels, vocab_size=11), randn(9, 2, 16)
    )  # both results: the loss and the log of the denominator
    cos, sin = (t.double() for t in tables(7, 4))
    assert check(
        lambda x: attention.packed_causal_attention(x, cos, sin, num_groups=1, head_dim=4),
        randn(7, 1, 16),
    )


@PRECISIONS
@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "reuse"])
@pytest.mark.parametrize("padding", [0, 5])
def test_cross_entropy(dtype: torch.dtype, tolerance: float, reuse: bool, padding: int) -> None:
    labels = torch.randint(43, (31, 3))

    def reference(logits: Tensor) -> Tensor:
        real = logits[..., :43].reshape(-1, 43)
        return F.cross_entropy(real, labels.view(-1), reduction="none").view_as(labels)

    def ours(logits: Tensor) -> Tensor:
        copy = logits * 1.0  # what is overwritten is not the leaf
        return functions.vocab_parallel_cross_entropy(
            copy, labels, vocab_size=43, reuse_logits=reuse
        )[0]

    logits = randn(31, 3, 43 + padding, dtype=dtype)
    with torch.no_grad():
        logits[..., 43:] = 1e4  # would win any softmax it took part in
    assert difference(ours, reference, logits) < tolerance
    (grad,) = torch.autograd.grad(ours(logits).sum(), logits)
    assert padding == 0 or grad[..., 43:].abs().max() == 0


def test_cross_entropy_refuses_quietly_wrong_results() -> None:
    logits = randn(4, 1, 16, dtype=torch.float32)
    labels = torch.tensor([[0], [11], [12], [-1]])
    loss, _ = functions.vocab_parallel_cross_entropy(
        logits * 1.0, labels, vocab_size=12, reuse_logits=True
    )
    assert loss.isnan().flatten().tolist() == [False, False, True, True]
    loss[:2].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten"):
        loss[:2].sum().backward()


def rank_cross_entropy(rank: int, port: int, columns: int, vocab_size: int, path: str) -> None:
    """One rank's columns of the same logits; saves its loss and its gradient."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    logits, labels = torch.load(path)
    first = rank * columns
    mine = logits[..., first : first + columns].contiguous().requires_grad_()
    loss, log_z = functions.vocab_parallel_cross_entropy(
        mine, labels, first_id=first, vocab_size=vocab_size, group=dist.group.WORLD
    )
    (loss + 0.1 * log_z.square()).sum().backward()
    torch.save((loss.detach(), mine.grad), f"{path}.{rank}")
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("vocab_size", [13, 8, 5], ids=["last pads", "rank 1 pads", "both pad"])
def test_cross_entropy_over_two_ranks(tmp_path, vocab_size: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logits = torch.randn(33, 2, 16) * 20  # far apart: a wrong common peak would overflow
    labels = torch.randint(vocab_size, (33, 2))
    path = str(tmp_path / "case")
    torch.save((logits, labels), path)
    mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
        rank_cross_entropy, (port, 8, vocab_size, path), nprocs=2, start_method="fork"
    )
    exact = logits.double().requires_grad_()
    real = exact[..., :vocab_size].reshape(-1, vocab_size)
    want = F.cross_entropy(real, labels.view(-1), reduction="none").view_as(labels)
    (want + 0.1 * real.logsumexp(-1).view_as(want).square()).sum().backward()
    (loss0, grad0), (loss1, grad1) = (torch.load(f"{path}.{rank}") for rank in range(2))
    assert torch.equal(loss0, loss1)
    torch.testing.assert_close(loss0.double(), want, rtol=1e-6, atol=1e-5)
    grads = torch.cat((grad0, grad1), dim=-1).double()
    torch.testing.assert_close(grads, exact.grad, rtol=1e-5, atol=1e-6)
