"""What one rank of each pipeline stage holds: parameters, and the memory of a training step.

Pure arithmetic on a configuration, so that it is known before anything is built. Parameters are exact
(the dry run compares them with the model that it builds); activations are an estimate of what the
backward pass needs, without the libraries' own memory and short-lived results.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_wd.config import Config


@dataclass(frozen=True)
class StageMemory:
    """One rank of a pipeline stage.

    Attributes:
        stage: position in the pipeline, from 0.
        layers: transformer blocks of the stage, over all its chunks.
        parameters: scalars on one rank: its share of each matrix, norms and padding rows whole.
        weight_bytes: fp32, or bf16 where products are bf16 or fp8.
        gradient_bytes: fp32, in the buffers that data parallelism reduces.
        optimizer_bytes: Adam's two fp32 means (of Muon's matrices one) and, beside bf16 weights, fp32
            masters; data-parallel ranks share them with the distributed optimizer.
        activation_bytes: what the backward pass of the micro-batches in flight needs, and the logits.
    """

    stage: int
    layers: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
        )


def pipeline_memory(config: Config, ranks: int) -> list[StageMemory]:
    """Memory of one rank of every pipeline stage; the ranks of a stage are alike.

    Args:
        config: validated, also for this number of ranks.
        ranks: processes over all nodes.

    Returns:
        The stages in order.
    """
    parallel, half = config.parallel, config.precision != "fp32"
    replicas = ranks // (parallel.tensor * parallel.pipeline)  # context ranks hold the same weights
    sharing = replicas if parallel.distributed_optimizer else 1
    stages = []
    for stage in range(parallel.pipeline):
        parameters = stage_parameters(config, stage)
        stages.append(
            StageMemory(
                stage=stage,
                layers=config.model.num_layers // parallel.pipeline,
                parameters=parameters,
                weight_bytes=parameters * (2 if half else 4),
                gradient_bytes=parameters * 4,
                optimizer_bytes=_optimizer_bytes(config, parameters) // sharing,
                activation_bytes=_activation_bytes(config, stage, ranks // parallel.model_ranks),
            )
        )
    return stages


def stage_parameters(config: Config, stage: int) -> int:
    """Parameters on one rank of a pipeline stage, padding rows of the vocabulary included.

    Tensor-parallel ranks divide matrices, biases of their outputs and norms over heads; other norms and
    biases are whole on each. A tied table lies on the first and on the last stage.
    """
    model, facts, tensor = config.model, config.model.facts, config.parallel.tensor
    width, head, mlp = model.hidden_size, model.head_size, model.ffn_hidden_size
    query, key_value = model.num_attention_heads * head, model.kv_heads * head
    norm = width * (2 if facts.norm == "layer" else 1)
    branches = 2 if facts.gated_mlp else 1
    divided = _block_matrices(config)
    whole = 2 * norm
    if facts.qk_norm:
        divided += query + key_value
    if facts.biases:
        divided += query + 2 * key_value + branches * mlp
        whole += 2 * width
    layers = model.num_layers // config.parallel.pipeline
    total = layers * (divided // tensor + whole)
    first, last = stage == 0, stage == config.parallel.pipeline - 1
    table = model.padded_vocab_size // tensor * width
    if first:
        total += table
        if facts.positions == "learned":
            assert model.max_positions is not None, "validate() asks for it"
            total += model.max_positions * width
    if last:
        total += norm
        if not (first and model.tie_embeddings):
            total += table
    return total


def _block_matrices(config: Config) -> int:
    """Values in the attention and MLP matrices of one block, over all tensor-parallel ranks."""
    model = config.model
    query = model.num_attention_heads * model.head_size
    key_value = model.kv_heads * model.head_size
    branches = 2 if model.facts.gated_mlp else 1
    width = model.hidden_size
    return width * (2 * query + 2 * key_value + (branches + 1) * model.ffn_hidden_size)


def _optimizer_bytes(config: Config, parameters: int) -> int:
    """Optimizer state of one rank that holds all of it.

    Adam keeps two fp32 means of each parameter, Muon one of each attention and MLP matrix; bf16 weights
    have fp32 masters beside them.
    """
    total = parameters * (8 if config.precision == "fp32" else 12)
    if config.optim.optimizer == "muon":
        layers = config.model.num_layers // config.parallel.pipeline
        total -= 4 * layers * _block_matrices(config) // config.parallel.tensor
    return total


def _activation_bytes(config: Config, stage: int, data_size: int) -> int:
    """Blocks of all micro-batches in flight, and on the last stage norm, logits and softmax."""
    model, train, parallel = config.model, config.train, config.parallel
    value = 4 if config.precision == "fp32" else 2
    tokens = train.micro_batch_samples * train.sequence_tokens // parallel.context
    block, stream = _block_values(config)
    layers = model.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
    flying = _chunks_in_flight(config, stage, data_size)
    if (
        train.recompute == "full"
    ):  # the two sublayers' inputs; one block is computed again at a time
        values = flying * layers * 2 * stream + block
    else:
        values = flying * layers * block
    total = values * tokens * value
    if stage == parallel.pipeline - 1:
        classes = model.padded_vocab_size // parallel.tensor
        # The softmax is computed in fp32, beside a copy of the logits where those are not.
        total += tokens * (2 * stream * value + classes * (value + (4 if value == 4 else 8)))
    return total


def _block_values(config: Config) -> tuple[int, int]:
    """Values per token of one rank: what a block keeps for its backward pass, and the residual stream.

    After Korthikanti et al., arXiv 2205.05198, for attention that keeps no scores: input and output of
    both norms, queries, keys, values, attention's output, the MLP before and after its activation.
    """
    model, facts, tensor = config.model, config.model.facts, config.parallel.tensor
    stream = model.hidden_size // (tensor if config.parallel.sequence else 1)
    query = model.num_attention_heads * model.head_size
    key_value = model.kv_heads * model.head_size
    divided = 2 * query + 2 * key_value + (3 if facts.gated_mlp else 2) * model.ffn_hidden_size
    if facts.qk_norm:
        divided += query + key_value
    return 4 * stream + divided // tensor, stream


def _chunks_in_flight(config: Config, stage: int, data_size: int) -> int:
    """Forward passes of model chunks whose backward pass has not been, at most.

    The schedule of Narayanan et al., arXiv 2104.04473: one forward, one backward after a warmup that is
    longer the earlier the stage; interleaved, all chunks but the last of each stage come on top.
    """
    parallel, train = config.parallel, config.train
    micro_batches = train.global_batch_samples // (train.micro_batch_samples * data_size)
    behind = parallel.pipeline - stage - 1
    if parallel.virtual_pipeline == 1:
        return min(behind + 1, micro_batches)
    warmup = 2 * behind + (parallel.virtual_pipeline - 1) * parallel.pipeline
    return min(warmup + 1, micro_batches * parallel.virtual_pipeline)
