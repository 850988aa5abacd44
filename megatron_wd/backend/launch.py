"""The processes of a run: how many there are, how they are started, and what their ends mean.

torchrun starts the processes; it ends with 1 whatever happened to them, and shows its own
traceback. Here each worker leaves its exit code in a folder that the launcher names in the
environment, and the launcher ends with what those codes mean together. `launch/pretrain.sh` works
that way by itself; a plain `torchrun` does where this package is installed, because torchrun then
loads `torchrun_plugin`.

Nothing here imports torch before a launch: a wrong command line must be told at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_wd.config import ParallelConfig, UserError
from megatron_wd.config.cli import EXIT_DONE, EXIT_FAILED, EXIT_SAVED, EXIT_USAGE, print_error

CODES_VARIABLE = "MEGATRON_WD_EXIT_CODES"  # the folder with one file for each worker
SAVE_TIMEOUT_S = 90  # for saving after a signal; torchrun's own 30 s are short for a large model
TERMINATED = -signal.SIGTERM  # as subprocess reports a process that SIGTERM ended


def is_worker() -> bool:
    """Whether this process was started by torchrun, or by something that names its rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def count_nodes() -> int:
    """Machines of the run, from torchrun's PET_NNODES."""
    return _positive("PET_NNODES", os.environ.get("PET_NNODES", "1"))


def count_processes(parallel: ParallelConfig) -> int:
    """Processes to start on this machine.

    Returns:
        NPROC_PER_NODE (or torchrun's PET_NPROC_PER_NODE) where it is set, else one for each GPU,
        else as many as one copy of the model needs.

    Raises:
        UserError: For a variable that is no number.
    """
    for name in ("NPROC_PER_NODE", "PET_NPROC_PER_NODE"):
        if name in os.environ:
            return _positive(name, os.environ[name])
    return count_gpus() or parallel.model_ranks


def count_gpus() -> int:
    """GPUs that CUDA would use here, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = [part.strip() for part in visible.split(",")]
        # CUDA ignores everything from the first invalid entry on; -1 is the usual way to say
        # "none".
        end = next((i for i, d in enumerate(devices) if not d or d.startswith("-")), len(devices))
        if end == 0:
            return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    lines = [line.strip() for line in listed.stdout.splitlines()]
    present = sum(line.startswith("GPU ") for line in lines)
    if any(line.startswith("MIG ") for line in lines):
        present = min(present, 1)  # of a partitioned GPU, a process sees one part
    return present if visible is None else min(present, end)


def limit_threads(local_processes: int) -> None:
    """Shares the cores among processes, before torch is imported; a user's own value is kept."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // local_processes)))


def run_worker(work: Callable[[], int]) -> int:
    """Runs one rank's work and leaves its exit code for the launcher.

    Args:
        work: Returns the exit code.

    Returns:
        The exit code: that of `work`, 2 for a UserError, 1 for any other exception.
    """
    try:
        code = work()
    except SystemExit as stop:  # argparse, after --help
        code = stop.code if isinstance(stop.code, int) else EXIT_DONE
    except UserError as error:
        _report_once(error)
        code = EXIT_USAGE
    except KeyboardInterrupt:
        code = EXIT_FAILED
    except Exception:
        traceback.print_exc()
        code = EXIT_FAILED
    folder = os.environ.get(CODES_VARIABLE)
    if folder and os.path.isdir(folder):
        Path(folder, os.environ.get("RANK", "0")).write_text(str(code))
    return code


def launch(script: str, arguments: Sequence[str], processes: int) -> int:
    """Runs a script in several processes through torchrun's library, and waits for them.

    Args:
        script: Python file that each process runs; it must call `run_worker`.
        arguments: Its arguments.
        processes: Processes on this machine. Several machines find each other by torchrun's PET_*
            environment variables, such as PET_RDZV_ENDPOINT.

    Returns:
        The exit code that the workers' codes mean together, see `combined_code`.
    """
    folder = prepare_codes()
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    quiet_elastic()
    flags = ["--nproc-per-node", str(processes)]
    if not {"PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"} & os.environ.keys():
        flags += ["--shutdown-timeout", str(SAVE_TIMEOUT_S)]
    if count_nodes() == 1:
        # The address is given, because not every machine can resolve its own name.
        flags += ["--standalone", "--local-addr", "127.0.0.1"]
    try:
        torchrun.run(torchrun.parse_args([*flags, script, *arguments]))
    except SignalException:
        return combined_code(recorded_codes(folder, processes))
    except ChildFailedError as error:
        _report_deaths(error)
        return combined_code([failure.exitcode for failure in error.failures.values()])
    return EXIT_DONE


def combined_code(codes: Iterable[int | None]) -> int:
    """Says what the exit codes of the workers mean together.

    Args:
        codes: One for each worker that matters; None where one left no code, negative for a signal.

    Returns:
        1 if any worker failed; else 2 if any met wrong use; else 3 if any was stopped after saving:
        saving takes all ranks, so one that knows of it speaks for all. torchrun ends the rest with
        SIGTERM as soon as the first has left, which says nothing. 0 if all are done.
    """
    seen = set(codes)
    if seen - {EXIT_DONE, EXIT_USAGE, EXIT_SAVED, TERMINATED}:
        return EXIT_FAILED
    for code in (EXIT_USAGE, EXIT_SAVED):
        if code in seen:
            return code
    return EXIT_DONE if seen == {EXIT_DONE} else EXIT_FAILED


def prepare_codes() -> str:
    """Makes the folder in which workers leave their codes; a second call finds it again."""
    folder = os.environ.get(CODES_VARIABLE)
    if not folder or not os.path.isdir(folder):
        folder = tempfile.mkdtemp(prefix="megatron_wd_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[CODES_VARIABLE] = folder
    return folder


def recorded_codes(folder: str, processes: int) -> list[int | None]:
    """Reads what the workers left; None for each that left nothing."""
    codes: list[int | None] = [int(path.read_text() or "1") for path in Path(folder).iterdir()]
    return codes + [None] * (processes - len(codes))


def quiet_elastic() -> None:
    """Silences torchrun's remarks about workers that ended: their own messages say more."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def torchrun_plugin() -> Callable[[Any], Any]:
    """Lets a plain `torchrun` end with the workers' code; torchrun loads it as an entry point.

    The entry point's group is meant for rendezvous backends, but it is the one thing of ours that
    torchrun runs in its own process. Where no worker of ours leaves a code, nothing changes.

    Returns:
        A rendezvous backend, as torchrun wants it, that nobody can choose.
    """
    folder, show = prepare_codes(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failures = getattr(error, "failures", None)
        codes = recorded_codes(folder, 0)
        if not codes or kind.__name__ not in ("SignalException", "ChildFailedError"):
            show(kind, error, trace)
            return
        if failures:
            codes += [failure.exitcode for failure in failures.values()]
        code = combined_code(codes)
        if code == EXIT_FAILED:
            show(kind, error, trace)
            return
        raise SystemExit(code)

    def refuse(parameters: Any) -> Any:
        raise UserError("megatron_wd is no rendezvous backend; use --rdzv-backend c10d")

    sys.excepthook = hook
    return refuse


def _report_once(error: UserError) -> None:
    """Prints a mistake that probably every rank has met, on one of them."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        # Usually rank 0 has met it too, and torchrun ends this process before it gets to speak.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
        print(f"rank {rank}:", end=" ", file=sys.stderr)
    print_error(error)


def _report_deaths(error: Any) -> None:
    """Names workers that a signal ended, since they could not say anything themselves."""
    for rank, failure in sorted(error.failures.items()):
        if failure.exitcode < 0 and failure.exitcode != TERMINATED:
            name = signal.Signals(-failure.exitcode).name
            hint = "; the machine may have run out of memory" if name == "SIGKILL" else ""
            print(f"error: rank {rank} was ended by {name}{hint}", file=sys.stderr)


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"the environment variable {name} is {text!r}; set it to a number like 2")
    return int(text)
