"""A CPU stand-in for the CUDA calls that Megatron Core makes unconditionally.

Megatron Core asks for CUDA streams, events, random states, devices and tensor type names even where
the work itself would run anywhere. `install` answers those requests on the CPU, so the same training
code runs on a laptop, in tests and in CI. It refuses to load where CUDA exists: there the real thing
is used and nothing here takes effect.

Two scopes, each as narrow as it can be:

* `install` replaces `torch.cuda` entry points once per process. They would raise here anyway.
* `cuda_requests_on_cpu` is a context for Megatron's own code only: `device="cuda"` becomes the CPU and
  `Tensor.type()` answers the CUDA name that Megatron's optimizers compare with.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


class CpuStream:
    """A stream of work that is always already done. A class: transformers evaluates `Stream | None`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Returns at once: work on the CPU is done when it was called."""

    def wait_event(self, event: Any) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Returns an event that has already happened."""
        return event or CpuEvent()


class CpuEvent:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Marks nothing: the event has happened."""

    def wait(self, stream: Any = None) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """True: the event has happened."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


@contextlib.contextmanager
def _fork_named_rng(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """`CudaRNGStatesTracker.fork` where the named and the default stream share the CPU's generator.

    Megatron's own version saves and restores the CPU generator besides the CUDA one. Here they are the
    same object, and its order of restoring would leave the default stream at the *named* stream's state,
    so that dropout in replicated regions would differ between tensor-parallel ranks.
    """
    if name not in self.states_:
        raise KeyError(f"random stream {name!r} was never added")
    default_state = torch.get_rng_state()
    torch.set_rng_state(self.states_[name])
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(default_state)


def install() -> None:
    """Answers Megatron Core's CUDA requests on the CPU, for the rest of this process. Idempotent.

    Raises:
        RuntimeError: where CUDA is available; the stand-in must never shadow it.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("the CPU stand-in must not be installed where CUDA is available")
    if _installed:
        return
    _installed = True
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment]
    # One function each: torch's tracer refuses two torch entry points that are the same object.
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = CpuStream  # type: ignore[misc,assignment]
    torch.cuda.Event = CpuEvent  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda device=None: CpuStream()  # type: ignore[assignment]
    torch.cuda.default_stream = lambda device=None: CpuStream()  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.set_rng_state = _set_rng_state
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]

    _import_without_compiler()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    random.CudaRNGStatesTracker.fork = _fork_named_rng
    _leave_buffers_of_one_rank_in_place()


def _leave_buffers_of_one_rank_in_place() -> None:
    """Skips a collective whose output is its input, which one rank alone asks for at every step.

    NCCL sees that there is nothing to do. Gloo copies the whole gradient and weight buffers there and
    back on one thread, some 2 % of a step of a small model.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def unless_in_place(collective: Any) -> Any:
        @functools.wraps(collective)
        def call(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
            same = output.data_ptr() == input.data_ptr() and output.numel() == input.numel()
            if same and not options.get("async_op"):
                return None
            return collective(output, input, **options)

        return call

    buffers.dist_reduce_scatter_func = unless_in_place(buffers.dist_reduce_scatter_func)
    buffers.dist_all_gather_func = unless_in_place(buffers.dist_all_gather_func)


def _import_without_compiler() -> None:
    """Imports Megatron Core without torch.compile around its small functions.

    Compiling needs a C++ compiler at run time, and the tracer alone takes seconds to import. Megatron
    has a switch for it, but only after the package is imported, so the decorator is held back until then.
    """
    compile_function = torch.compile
    torch.compile = lambda function=None, **options: function or (lambda f: f)  # type: ignore
    try:
        from megatron.core import jit

        jit.disable_jit_fuser()
    finally:
        torch.compile = compile_function


class _CudaRequestsOnCpu(TorchFunctionMode):
    """Maps `device="cuda"` to the CPU and lets `Tensor.type()` answer with the CUDA name."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def cuda_requests_on_cpu() -> contextlib.AbstractContextManager[Any]:
    """The context in which Megatron Core's code runs; does nothing where CUDA is available."""
    return _CudaRequestsOnCpu() if _installed else contextlib.nullcontext()
