"""Floating-point operations of a step, and the peak that they are compared with."""

from __future__ import annotations

import statistics
import time

import torch

from megatron_wd.config import Config, ModelConfig

# Dense bf16 peak of one device in TFLOP/s, from NVIDIA's data sheets (without sparsity).
GPU_PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0}


def flops_per_token(model: ModelConfig, sequence_tokens: int) -> float:
    """Operations of matrix products for one token, forward and backward, without recomputation.

    6 for each weight that multiplies the token (2 forward, 4 backward; the embedding is a look-up) and, for
    causal attention, 6 * sequence_tokens * width of all heads per layer (half of the score matrix).
    """
    width, head = model.hidden_size, model.head_size
    qkv = width * head * (model.num_attention_heads + 2 * model.kv_heads)
    proj = model.num_attention_heads * head * width
    mlp = (3 if model.facts.gated_mlp else 2) * width * model.ffn_hidden_size
    matmul_weights = model.num_layers * (qkv + proj + mlp)
    matmul_weights += width * model.vocab_size
    attention = model.num_layers * sequence_tokens * model.num_attention_heads * head
    return 6.0 * (matmul_weights + attention)


def peak_tflops(config: Config) -> tuple[float | None, str]:
    """Peak of one rank in TFLOP/s, and where the number is from.

    `log.peak_tflops` if set; the data sheet's for known GPUs; on the CPU a 1024-wide matrix product in the
    run's precision, timed here by all ranks at once. None where nothing is known.
    """
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops, "log.peak_tflops"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        for known, peak in GPU_PEAK_TFLOPS.items():
            if known in name:
                return peak, f"data sheet of {known}, bf16 dense"
        return None, f"unknown for {name}: set log.peak_tflops"
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    return _measured_tflops(dtype), "measured here: 1024-wide matrix product"


def _measured_tflops(dtype: torch.dtype, width: int = 1024, repeats: int = 7) -> float:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(width, width, generator=generator).to(dtype)
    torch.mm(a, a)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - start)
    return 2.0 * width**3 / statistics.median(times) / 1e12
