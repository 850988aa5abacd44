"""Checkpoints: Megatron's torch_dist layout, complete or absent.

    checkpoints/iter_0001000/                       appears by a rename, when all of it is on disk
    checkpoints/latest_checkpointed_iteration.txt   written after that, itself by a rename

A checkpoint describes itself: it also holds the resolved config.yaml, provenance.json and the
tokenizer. It can be loaded on another layout, optimizer state included.
"""

from __future__ import annotations

import math
import os
import queue
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_wd.backend import cpu
from megatron_wd.backend.world import World, run_on_main
from megatron_wd.config import Config, UserError, num_parameters, resolved_yaml
from megatron_wd.models.names import unwrap
from megatron_wd.optim.build import RatedOptimizer

LATEST_FILE = "latest_checkpointed_iteration.txt"
_PARTIAL_PREFIX = ".partial-"
# The optimizer state in this format can be loaded on another TP, PP and DP.
_OPTIMIZER_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


@dataclass
class Progress:
    """How far the run is; all of the state that is neither weight nor optimizer state.

    Attributes:
        step: updates done.
        consumed_samples: samples trained on.
        radii: norm at which AdamH keeps each matrix; empty under other optimizers.
        log_kept: for each parameter, the logarithm of what decay has left of its first squared norm.
    """

    step: int = 0
    consumed_samples: int = 0
    radii: dict[str, float] = field(default_factory=dict)
    log_kept: dict[str, float] = field(default_factory=dict)

    def advance(self, samples: int, decayed: Mapping[str, float]) -> None:
        """Counts an update that trained on `samples` and took a part `decayed` of each parameter."""
        self.step += 1
        self.consumed_samples += samples
        for name, part in decayed.items():
            self.log_kept[name] = self.log_kept.get(name, 0.0) + 2.0 * math.log1p(-part)

    def relaxed(self, parameter: str) -> float:
        """How far a parameter's squared norm has gone from its first value to its equilibrium, 0 to 1: what
        decay has taken of the first, when steps are at right angles to the weight."""
        return -math.expm1(self.log_kept.get(parameter, 0.0))


def iteration_name(step: int) -> str:
    """Megatron's folder name of a step."""
    return f"iter_{step:07d}"


def _saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order."""
    names = (re.fullmatch(r"iter_(\d{7,})", p.name) for p in folder.glob("iter_*") if p.is_dir())
    return sorted(int(name.group(1)) for name in names if name)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run; None if there is none.

    Raises:
        UserError: the tracker names a checkpoint that is not there.
    """
    tracker = run_dir / "checkpoints" / LATEST_FILE
    if not tracker.is_file():
        # A folder of this name is complete, so a run that was killed before it wrote the tracker loses
        # nothing; nor does one whose tracker got lost.
        steps = _saved_steps(tracker.parent)
        return tracker.parent / iteration_name(steps[-1]) if steps else None
    text = tracker.read_text(errors="replace").strip()
    known = re.fullmatch(r"[0-9]{1,12}", text)
    folder = tracker.parent / iteration_name(int(text)) if known else None
    if folder is None or not folder.is_dir():
        raise UserError(
            f"{tracker} names step {text!r}, but there is no such folder beside it. Write the step of an "
            "existing iter_ folder into it, or remove it to use the newest one."
        )
    return folder


def interrupted_saves(run_dir: Path) -> list[str]:
    """Names of checkpoints whose saving was cut off."""
    folder = run_dir / "checkpoints"
    return sorted(p.name.removeprefix(_PARTIAL_PREFIX) for p in folder.glob(_PARTIAL_PREFIX + "*"))


class Checkpointer:
    """Saves the run's state, in the background if asked to.

    Args:
        config: the run.
        model, optimizer: what is saved.
        world: this rank's place.
        save_tokenizer: writes the tokenizer's files into a folder.
    """

    def __init__(
        self,
        config: Config,
        model: list[nn.Module],
        optimizer: RatedOptimizer,
        world: World,
        save_tokenizer: Callable[[Path], None],
    ) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.save_tokenizer = save_tokenizer
        self.folder = Path(config.run_dir) / "checkpoints"
        self._queue = AsyncCallsQueue() if config.checkpoint.async_save else None
        # A background save reports through a queue in a process of its own, which takes seconds to start
        # and 500 MB; a save in this process needs no more than a queue.
        filesystem_async._results_queue = None if self._queue else queue.Queue()

    def save(self, progress: Progress) -> None:
        """Saves a step. Collective. With async_save it returns while files are still written.

        Raises:
            UserError: the disk is full or cannot be written; what was saved before stays the latest.
        """
        self.wait()
        target = self.folder / iteration_name(progress.step)
        partial = self.folder / (_PARTIAL_PREFIX + target.name)
        self._on_main(lambda: self._start(partial), target)
        state = _state_dict(self.model, self.optimizer, is_loading=False)
        if self.optimizer.hyperball is not None:
            progress.radii = self.optimizer.hyperball.named_radii()
        state["progress"] = asdict(progress)
        try:
            with cpu.cuda_requests_on_cpu():
                request = dist_checkpointing.save(
                    state,
                    str(partial),
                    async_sharded_save=self._queue is not None,
                    async_strategy="mcore",
                    verify_integrity=self.config.checkpoint.verify_integrity,
                )
        except (OSError, CheckpointException) as error:
            # Megatron reports a rank's failed write to all of them; what exactly failed was printed there.
            self._clean_up(partial)
            raise _save_error(target, _root_cause(error)) from error
        if self._queue is None:
            self._finish(partial, target, progress.step)
        else:
            assert request is not None
            request.add_finalize_fn(lambda: self._finish(partial, target, progress.step))
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Completes a background save whose files are all written; returns at once otherwise."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Completes a background save, waiting for it."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)

    def _start(self, partial: Path) -> None:
        for leftover in self.folder.glob(_PARTIAL_PREFIX + "*"):
            shutil.rmtree(leftover)
        try:
            partial.mkdir(parents=True)
            (partial / "config.yaml").write_text(resolved_yaml(self.config))
            self.save_tokenizer(partial / "tokenizer")
            shutil.copy(self.folder.parent / "provenance.json", partial)
            needed, free = checkpoint_bytes(self.config), shutil.disk_usage(partial).free
            if free < needed:
                raise OSError(f"{needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free")
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _finish(self, partial: Path, target: Path, step: int) -> None:
        def publish() -> None:
            if target.exists():
                shutil.rmtree(target)
            os.rename(partial, target)
            tracker = self.folder / LATEST_FILE
            temporary = tracker.with_suffix(".tmp")
            temporary.write_text(f"{step}\n")
            os.replace(temporary, tracker)
            self._prune(step)

        self._on_main(publish, target)

    def _prune(self, newest_step: int) -> None:
        keep = self.config.checkpoint.keep_last
        if keep is None:
            return
        for step in [s for s in _saved_steps(self.folder) if s <= newest_step][:-keep]:
            shutil.rmtree(self.folder / iteration_name(step))

    def _on_main(self, action: Callable[[], None], target: Path) -> None:
        """Runs something on the main rank; a disk that refuses there stops every rank."""
        try:
            run_on_main(self.world, action)
        except OSError as error:
            raise _save_error(target, error) from error

    def _clean_up(self, partial: Path) -> None:
        if self.world.is_main:
            shutil.rmtree(partial, ignore_errors=True)


def checkpoint_bytes(config: Config) -> int:
    """Estimated size of a checkpoint: weights, fp32 masters and Adam's two means."""
    weight_bytes = 4 if config.precision == "fp32" else 2
    return num_parameters(config.model) * (weight_bytes + 12)


def _root_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error)
    rank, (cause, _trace) = next(iter(failures.items()))
    return f"rank {rank}: {cause}"


def _save_error(target: Path, reason: object) -> UserError:
    return UserError(
        f"checkpoint {target} could not be saved: {reason}. The checkpoint before it stays the latest. Free "
        "space or repair the disk, then start the run again: it resumes from there."
    )


def load_checkpoint(path: Path, model: list[nn.Module], optimizer: RatedOptimizer) -> Progress:
    """Loads weights, optimizer state and progress, saved on any layout. Collective.

    Raises:
        UserError: the checkpoint does not hold what this run needs.
    """
    state = without_absent_extra_states(_state_dict(model, optimizer, is_loading=True), path)
    loaded = _load(state, path)
    for index, chunk in enumerate(model):
        load_weights(unwrap(chunk), loaded[f"model{index}"])
    with cpu.cuda_requests_on_cpu():
        optimizer.load_state_dict(loaded["optimizer"])
    progress = Progress(**loaded["progress"])
    if optimizer.hyperball is not None and progress.radii:
        optimizer.hyperball.set_radii(progress.radii)
    return progress


def without_absent_extra_states(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a checkpoint can give of a sharded state: Transformer Engine's layers ask for fp8 scales (their
    extra state), which a checkpoint of other layers does not have.

    Raises:
        UserError: the checkpoint is damaged.
    """

    def is_extra(value: Any) -> bool:
        return isinstance(value, ShardedObject) and value.key.endswith("_extra_state")

    if not any(is_extra(value) for value in nested_values(state)):
        return state
    try:
        present = {value.key for value in load_sharded_metadata(str(path)).values()}
    except (Exception, CheckpointException) as error:
        raise _load_error(path, error) from error
    kept, _absent = extract_matching_values(
        state, lambda value: not (is_extra(value) and value.key not in present)
    )
    return cast(dict[str, Any], kept)


def load_weights(model: nn.Module, state: dict[str, Any]) -> None:
    """Loads a chunk's weights: all of them, and of Transformer Engine's extra state what there is."""
    result = model.load_state_dict(state, strict=False)
    wrong = [name for name in result.missing_keys if not name.endswith("_extra_state")]
    assert not wrong and not result.unexpected_keys, (wrong, result.unexpected_keys)


def _state_dict(
    model: list[nn.Module], optimizer: RatedOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata={})  # type: ignore[operator]
        for index, chunk in enumerate(model)
    }
    with cpu.cuda_requests_on_cpu():
        state["optimizer"] = optimizer.megatron.sharded_state_dict(
            state, is_loading=is_loading, metadata=dict(_OPTIMIZER_FORMAT)
        )
    return state


def _load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        with cpu.cuda_requests_on_cpu():
            hashed = (path / "integrity.json").is_file()
            loaded = dist_checkpointing.load(state, str(path), verify_integrity=hashed)
            return cast(dict[str, Any], loaded)
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        raise _load_error(path, error) from error


def _load_error(path: Path, error: BaseException) -> UserError:
    return UserError(
        f"checkpoint {path} cannot be loaded into this run: {type(error).__name__}: "
        f"{_root_cause(error)}. If it is damaged, write the step of an older one into "
        f"{path.parent / LATEST_FILE}."
    )
