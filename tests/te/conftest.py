"""Transformer Engine's own classes on a machine without a GPU (`make te-check`); else not collected.

They can be constructed, saved and loaded on the CPU, though not run, once CUDA seems to be there. That is
pretended here and nowhere else.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))  # tiny.py, ranks.py


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """CUDA seems to be there, with one Hopper GPU."""
    import torch

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            major=9, minor=0, multi_processor_count=132, name="pretended H100"
        ),
        "get_device_name": lambda device=None: "pretended H100",
    }
    before = {name: getattr(torch.cuda, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)
        yield
    finally:
        for name, answer in before.items():
            setattr(torch.cuda, name, answer)


if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from megatron_wd.backend import cpu

    cpu.install()  # before CUDA is pretended
    with pretended_gpu():
        import transformer_engine.pytorch  # noqa: F401
