"""What every test shares: one thread per process, no network, GPU tests only with a GPU."""

import os
from pathlib import Path

# Before anything imports torch. Ranks of a distributed test share the cores, and with more than one
# thread each they would mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that reaches for a model or dataset hub fails at once instead of hanging without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that fork ranks first, and skips those marked `gpu` on machines without CUDA.

    Ranks are forked, and a process in which a backward pass has run cannot fork one that runs another.
    """
    items.sort(key=lambda item: not {"run_ranks", "run_config"} & vars(item.module).keys())
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny run, its data and tokenizer beside it, in a folder for this test file."""
    from tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))
