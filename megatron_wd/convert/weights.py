"""Weights to start from or to convert, whatever holds them, under the names of our checkpoints.

`open_weights` takes a Hugging Face folder, a run or checkpoint of ours, or a checkpoint of
Megatron-LM's GPTModel. Every rank of a run can open the same ones and read what it needs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wd.config import ModelConfig, UserError
from megatron_wd.convert.checkpoint import Checkpoint, open_checkpoint
from megatron_wd.convert.dcp import METADATA, Allocate, TensorFolder
from megatron_wd.convert.families import converted_family
from megatron_wd.convert.hf_config import read_config
from megatron_wd.convert.megatron_lm import gpt_names, is_gpt_model
from megatron_wd.convert.names import is_model_tensor, match_checkpoint, raise_misfits, tensors_of
from megatron_wd.convert.packing import PADDED_ROWS, Shape, Tensors
from megatron_wd.convert.safetensors_folder import SafetensorsFolder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Source:
    tensors: Tensors
    dtype: str
    read: Callable[[Allocate | None], Tensor]


class Weights:
    """The weights of a model; only their list is in memory.

    Attributes:
        path: Folder that holds them.
        kind: "huggingface", "megatron_wd" or "megatron_lm".
        model: Shape of the model.
        tokenizer: Folder with the tokenizer's files, or None.
        description: What they are, in a few words.
        has_fp16: Whether some are stored as fp16; `read` returns fp32 for them.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        model: ModelConfig,
        tokenizer: Path | None,
        description: str,
        sources: Sequence[_Source],
        *,
        has_fp16: bool = False,
    ):
        self.path, self.kind, self.model = path, kind, model
        self.tokenizer, self.description = tokenizer, description
        self.has_fp16 = has_fp16
        self._sources = {source.tensors.name: source for source in sources}

    @property
    def names(self) -> list[str]:
        """Names of the tensors in our checkpoints, in the order of the layers."""
        return list(self._sources)

    @property
    def tensors(self) -> list[Tensors]:
        """Description of each tensor, in the order of the layers."""
        return [source.tensors for source in self._sources.values()]

    @property
    def dtypes(self) -> set[str]:
        """Dtypes of the tensors, by their torch names."""
        return {source.dtype for source in self._sources.values()}

    def dtype(self, name: str) -> str:
        """Dtype of a tensor, by its torch name."""
        return self._sources[name].dtype

    def read(self, name: str) -> Tensor:
        """Reads a tensor, whole, in Megatron's packing, the vocabulary padded.

        Args:
            name: Its usual name in our checkpoints.

        Raises:
            UserError: If it cannot be read.
        """
        return self._sources[name].read(None)

    def read_ahead(self) -> Iterator[tuple[Tensors, Tensor]]:
        """Reads all tensors, in the order of the layers, the next one while the caller has this one.

        Disk and caller work at the same time, in the memory of two tensors, which is used again and
        again: a tensor is gone when the next one is asked for.
        """
        memories = itertools.cycle((_Memory(), _Memory()))
        with ThreadPoolExecutor(1) as pool:
            waiting: deque[tuple[Tensors, Future[Tensor]]] = deque()
            for source, memory in zip(self._sources.values(), memories, strict=False):
                waiting.append((source.tensors, pool.submit(source.read, memory.allocate)))
                if len(waiting) == 2:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for last, future in waiting:
                yield last, future.result()


class _Memory:
    """Memory for one tensor after another; fresh memory costs more than what is read into it."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def allocate(self, shape: Shape, *, dtype: Any) -> Tensor:
        """As `torch.empty`; what was allocated before is overwritten."""
        import torch

        needed = math.prod(shape) * dtype.itemsize
        if self._bytes is None or self._bytes.numel() < needed:
            self._bytes = None  # not both at once
            self._bytes = torch.empty(needed, dtype=torch.uint8)
        return self._bytes[:needed].view(dtype).view(shape)


def open_weights(path: Path, step: int | None = None) -> Weights:
    """Opens the weights that a folder holds; reads their list, but no tensor.

    Args:
        path: A Hugging Face folder, a run folder, its `checkpoints` folder, one checkpoint, a result
            of from-hf, or a torch_dist checkpoint of Megatron-LM's GPTModel.
        step: The checkpoint of this step, where there are several; None for the latest.

    Raises:
        UserError: If there is none, it is not complete, or its model is not supported.
    """
    if is_hf_folder(path):
        if step is not None:
            raise UserError(f"{path} is a Hugging Face folder, which has no steps.")
        return _open_hf(path)
    return weights_of(open_checkpoint(path, step))


def is_hf_folder(path: Path) -> bool:
    """Whether a folder is meant as a Hugging Face folder, complete or not."""
    if not path.is_dir() or (path / METADATA).is_file():
        return False
    return (path / "config.json").is_file() or any(path.glob("*.safetensors"))


def weights_of(checkpoint: Checkpoint) -> Weights:
    """Opens the weights of a checkpoint; as `open_weights`."""
    folder = TensorFolder(checkpoint.folder)
    shapes = {name: stored.shape for name, stored in folder.tensors.items()}
    gpt = is_gpt_model(shapes)
    if gpt:
        matched = _match_gpt(checkpoint, shapes)
    else:
        found = match_checkpoint(checkpoint.model, shapes, where=checkpoint.said_by)
        matched = [(name, None, tensors) for name, tensors in found]
    folder.check_files({name for name, _, _ in matched})
    sources = [
        _Source(
            tensors,
            folder.tensors[name].dtype,
            _checkpoint_reader(folder, name, layer, tensors, checkpoint.model),
        )
        for name, layer, tensors in matched
    ]
    step = "" if checkpoint.step is None else f" (step {checkpoint.step})"
    kind = "Megatron-LM checkpoint" if gpt else "checkpoint"
    return Weights(
        checkpoint.folder,
        "megatron_lm" if gpt else "megatron_wd",
        checkpoint.model,
        checkpoint.tokenizer,
        f"{kind} {checkpoint.folder}{step}",
        sources,
    )


def _checkpoint_reader(
    folder: TensorFolder, name: str, layer: int | None, tensors: Tensors, model: ModelConfig
) -> Callable[[Allocate | None], Tensor]:
    def read(allocate: Allocate | None) -> Tensor:
        tensor = folder.read(name, layer, allocate)
        if tuple(tensor.shape) != tensors.megatron_shape:
            # Megatron-LM pads the vocabulary to another multiple than we do.
            tensor = tensors.packing.pack([tensor[: model.vocab_size]], model)
        return tensor

    return read


def _match_gpt(
    checkpoint: Checkpoint, shapes: dict[str, Shape]
) -> list[tuple[str, int | None, Tensors]]:
    """As `match_checkpoint`, for the names of Megatron's GPTModel."""
    model = checkpoint.model
    left = {name: shape for name, shape in shapes.items() if is_model_tensor(name)}
    used: set[str] = set()
    matched, missing, misshapen = [], [], []
    for tensors in tensors_of(model):
        names = gpt_names(tensors.megatron)
        name, layer = next(((n, i) for n, i in names if n in left), ("", None))
        if not name:
            missing.append(names[-1][0])
            continue
        used.add(name)
        needed = tensors.megatron_shape
        if tensors.packing is PADDED_ROWS and left[name][0] >= model.vocab_size:
            needed = (left[name][0], *needed[1:])
        if layer is not None:
            needed = (model.num_layers, *needed)
        if left[name] != needed:
            misshapen.append((name, left[name], needed))
        matched.append((name, layer, tensors))
    raise_misfits(
        f"{checkpoint.folder}: the tensors do not fit a {model.family} model of its "
        f"{checkpoint.said_by}",
        list(dict.fromkeys(missing)),
        sorted(set(left) - used),
        list(dict.fromkeys(misshapen)),
        "Is it a checkpoint of Megatron-LM's GPTModel, and complete?",
    )
    return matched


def _open_hf(path: Path) -> Weights:
    model = read_config(path)
    folder = SafetensorsFolder(path)
    found = _match_hf(path, model, folder)
    sources = [
        _Source(tensors, _packed_dtype(folder, stored), _hf_reader(folder, stored, tensors, model))
        for tensors, stored in found
    ]
    dtypes = ", ".join(sorted({source.dtype for source in sources}))
    architecture = converted_family(model.family).architecture
    return Weights(
        path,
        "huggingface",
        model,
        tokenizer_in(path),
        f"Hugging Face folder {path} ({architecture}, {dtypes})",
        sources,
        has_fp16=any(entry.dtype == "float16" for entry in folder.tensors.values()),
    )


def tokenizer_in(path: Path) -> Path | None:
    """The folder itself, if the files of a tokenizer lie in it."""
    files = ("tokenizer.json", "tokenizer.model")
    return path if any((path / name).is_file() for name in files) else None


def _packed_dtype(folder: SafetensorsFolder, stored: dict[str, str]) -> str:
    dtypes = {folder.dtype(name) for name in stored.values()}
    return "float32" if "float32" in dtypes else "bfloat16"


def _hf_reader(
    folder: SafetensorsFolder, stored: dict[str, str], tensors: Tensors, model: ModelConfig
) -> Callable[[Allocate | None], Tensor]:
    def read(allocate: Allocate | None) -> Tensor:
        import torch

        if not tensors.packing.whole_rows:
            return tensors.pack({name: folder.read(own) for name, own in stored.items()}, model)
        dtype = getattr(torch, _packed_dtype(folder, stored))
        packed = (allocate or torch.empty)(tensors.megatron_shape, dtype=dtype)
        rows = sum(shape[0] for _, shape in tensors.hf)
        packed[rows:] = 0  # what pads the vocabulary
        for name, part in tensors.unpack(packed, model).items():
            folder.read(stored[name], part)
        return packed

    return read


def _match_hf(
    path: Path, model: ModelConfig, folder: SafetensorsFolder
) -> list[tuple[Tensors, dict[str, str]]]:
    """Finds every tensor of a model in a Hugging Face folder.

    Returns:
        For each tensor of ours its parts: usual name -> name in this folder.
    """
    family = converted_family(model.family)
    names = {_full_name(name, family.optional_prefix): name for name in folder.tensors}
    left = {
        full: folder.tensors[name].shape
        for full, name in names.items()
        if not re.fullmatch(family.buffers, full)
    }
    found, missing, misshapen = [], [], []
    for tensors in tensors_of(model):
        for name, needed in tensors.hf:
            shape = left.pop(name, None)
            if shape is None:
                missing.append(name)
            elif shape != needed:
                misshapen.append((name, shape, needed))
        found.append((tensors, {name: names.get(name, name) for name, _ in tensors.hf}))
    head = "lm_head.weight"
    if model.tie_embeddings and head in left and not missing and not misshapen:
        _check_duplicate(path, folder, found[0][1], names[head])
        del left[head]
    raise_misfits(
        f"{path}: the tensors do not fit its config.json",
        missing,
        sorted(left),
        misshapen,
        "Nothing is left out or made up: get the whole model, or the config.json that belongs to it.",
    )
    return found


def _full_name(name: str, optional_prefix: str) -> str:
    if not optional_prefix or name.startswith((optional_prefix, "lm_head.")):
        return name
    return optional_prefix + name


def _check_duplicate(
    path: Path, folder: SafetensorsFolder, embedding: dict[str, str], head: str
) -> None:
    """A tied model may hold its output layer once more, if it is the embedding bit by bit."""
    import torch

    (name,) = embedding.values()
    same: Any = folder.tensors[name].dtype == folder.tensors[head].dtype
    same = same and folder.tensors[name].shape == folder.tensors[head].shape
    if same:
        one, other = (folder.read(n).view(-1).view(torch.uint8) for n in (name, head))
        same = torch.equal(one, other)
    if not same:
        raise UserError(
            f"{path}: config.json says tie_word_embeddings, but {head} differs from {name}."
        )
