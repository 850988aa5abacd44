"""A plain, well-written eager PyTorch Llama training loop: the baseline our own speed is compared
with.

Nothing of Megatron Core or megatron_wd is used here. It is meant to be what somebody who knows
PyTorch well
would write for one process: scaled-dot-product attention with `is_causal`, `F.rms_norm`, one fused
    QKV and one
fused gate-up matrix, torch's fused AdamW, gradient clipping, and fp32 master weights when computing
in bf16.

    python tools/bench/plain_llama.py --precision bf16 --threads 2

Prints one JSON object. Shapes: B batch, S sequence, D hidden, H query heads, K KV heads, E head
width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class PlainConfig:
    """The model and the batch of the comparison; the defaults are the 30M model of
    `configs/bench`."""

    num_layers: int = 8
    hidden_size: int = 512
    ffn_hidden_size: int = 1536
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab_size: int = 4096
    sequence_tokens: int = 512
    micro_batch_samples: int = 4
    micro_batches: int = 1
    """Micro-batches whose gradients are summed before one optimizer step."""
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


def rotary_tables(config: PlainConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency, fp32 [S, E/2]."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(config.sequence_tokens, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x_BHSE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of Hugging Face's Llama."""
    first, second = x_BHSE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """One pre-norm Llama layer: attention with grouped KV heads, then SwiGLU."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        D, E = config.hidden_size, config.head_dim
        self.attn_norm = nn.Parameter(torch.ones(D))
        self.mlp_norm = nn.Parameter(torch.ones(D))
        self.qkv = nn.Linear(D, (config.num_heads + 2 * config.num_kv_heads) * E, bias=False)
        self.out = nn.Linear(config.num_heads * E, D, bias=False)
        self.gate_up = nn.Linear(D, 2 * config.ffn_hidden_size, bias=False)
        self.down = nn.Linear(config.ffn_hidden_size, D, bias=False)

    def attention(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention of normed input."""
        c = self.config
        B, S, _ = x_BSD.shape
        H, K, E = c.num_heads, c.num_kv_heads, c.head_dim
        q, k, v = self.qkv(x_BSD).view(B, S, H + 2 * K, E).transpose(1, 2).split((H, K, K), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y_BHSE = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K)
        return self.out(y_BHSE.transpose(1, 2).reshape(B, S, H * E))

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Residual stream in, residual stream out."""
        D, eps = (self.config.hidden_size,), self.config.norm_eps
        x_BSD = x_BSD + self.attention(F.rms_norm(x_BSD, D, self.attn_norm, eps), cos, sin)
        gate, up = self.gate_up(F.rms_norm(x_BSD, D, self.mlp_norm, eps)).chunk(2, dim=-1)
        return x_BSD + self.down(F.silu(gate) * up)


class PlainLlama(nn.Module):
    """Untied Llama-2: embedding, blocks, final norm, output layer."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token."""
        x_BSD = self.embedding(ids_BS)
        if torch.is_autocast_enabled("cpu"):  # else the residual stream would stay fp32
            x_BSD = x_BSD.bfloat16()
        for block in self.blocks:
            x_BSD = block(x_BSD, self.cos, self.sin)
        x_BSD = F.rms_norm(x_BSD, (self.config.hidden_size,), self.final_norm, self.config.norm_eps)
        logits_BSV = self.output(x_BSD)
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


class PlainTrainer:
    """Model, fused AdamW and one training step.

    Precisions: "fp32"; "bf16" = bf16 working weights with fp32 master weights in AdamW;
    "bf16-autocast" = fp32 weights under `torch.autocast`. The faster of the two bf16 ways is the
    baseline (see the README of the benchmarks); both update fp32 master weights.
    """

    def __init__(
        self, config: PlainConfig, precision: str = "fp32", compile_model: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.config, self.precision = config, precision
        self.model = PlainLlama(config)
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.has_masters = precision == "bf16"
        if self.has_masters:
            self.model.bfloat16()
        self.params = list(self.model.parameters())
        if self.has_masters:
            # The bf16 conversion also rounds the rotary tables, which keeps rotary in bf16: fewer
            # bytes.
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        else:
            self.masters = self.params
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.loss_fn = torch.compile(self.model) if compile_model else self.model

    def micro_batch(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Forward and backward of one micro-batch; returns the detached loss."""
        autocast = self.precision == "bf16-autocast"
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = self.loss_fn(ids_BS, labels_BS)
        (loss / self.config.micro_batches).backward()
        return loss.detach()

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """One optimizer step over `micro_batches` micro-batches; returns their mean loss."""
        loss = torch.stack([self.micro_batch(ids, labels) for ids, labels in batches]).mean()
        if self.has_masters:
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.params])  # type: ignore
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        if self.has_masters:
            torch._foreach_copy_([p.data for p in self.params], self.masters)  # type: ignore
        for p in self.params:
            p.grad = None
        return loss.item()


def train_flops_per_token(config: PlainConfig) -> float:
    """Floating-point operations per trained token: 6 per matmul weight, and causal attention's two
    matmuls."""
    c = config
    qkv = c.hidden_size * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    layer = qkv + c.hidden_size * c.num_heads * c.head_dim + 3 * c.hidden_size * c.ffn_hidden_size
    weights = c.num_layers * layer + c.hidden_size * c.vocab_size
    return 6.0 * weights + 6.0 * c.num_layers * c.sequence_tokens * c.num_heads * c.head_dim


def measure(
    config: PlainConfig,
    precision: str,
    steps: int = 6,
    warmup: int = 2,
    compile_model: bool = False,
) -> dict[str, float | str | int]:
    """Train on random tokens and return the median tokens/s after `warmup` steps."""
    trainer = PlainTrainer(config, precision, compile_model)
    generator = torch.Generator().manual_seed(1)
    seconds, loss = [], float("nan")
    for _ in range(warmup + steps):
        shape = (config.micro_batches, config.micro_batch_samples, config.sequence_tokens + 1)
        tokens = torch.randint(config.vocab_size, shape, generator=generator)
        batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
        start = time.perf_counter()
        loss = trainer.step(batches)
        seconds.append(time.perf_counter() - start)
    tokens_per_step = config.micro_batches * config.micro_batch_samples * config.sequence_tokens
    tokens_per_s = tokens_per_step / statistics.median(seconds[warmup:])
    return {
        "precision": precision,
        "compiled": int(compile_model),
        "parameters": sum(p.numel() for p in trainer.params),
        "tokens_per_s": round(tokens_per_s, 1),
        "gflops": round(tokens_per_s * train_flops_per_token(config) / 1e9, 1),
        "step_s": round(statistics.median(seconds[warmup:]), 4),
        "loss": loss,
    }


def main() -> None:
    """Measure one precision and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--precision", choices=("fp32", "bf16", "bf16-autocast"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before them")
    parser.add_argument("--micro-batch-samples", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the model (needs a C++ compiler)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = PlainConfig(
        micro_batch_samples=args.micro_batch_samples, micro_batches=args.micro_batches
    )
    print(json.dumps(measure(config, args.precision, args.steps, args.warmup, args.compile)))


if __name__ == "__main__":
    main()
