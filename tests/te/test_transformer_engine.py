"""Our layers and Transformer Engine's are the same model: names, shapes, checkpoints both ways."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pretended_gpu
from megatron.core import dist_checkpointing
from megatron.core.extensions import transformer_engine as extensions
from test_families import FAMILIES
from tiny import write_tiny

from megatron_wd.backend import cpu
from megatron_wd.backend.world import single_process
from megatron_wd.config import Config, load_config
from megatron_wd.models.build import build_model
from megatron_wd.models.names import named_parameters, unwrap
from megatron_wd.train.checkpoint import load_weights, without_absent_extra_states


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("te"))


def build(config: Config, *, transformer_engine: bool) -> list[Any]:
    assert extensions.HAVE_TE
    if not transformer_engine:
        return build_model(config)
    with pretended_gpu():
        return build_model(config)


def module_types(model: list[Any]) -> set[str]:
    return {type(module).__module__.split(".")[0] for module in model[0].modules()}


def save(model: list[Any], folder: Path) -> None:
    folder.mkdir()
    with cpu.cuda_requests_on_cpu():
        dist_checkpointing.save({"model": unwrap(model[0]).sharded_state_dict()}, str(folder))


def load(model: list[Any], folder: Path) -> None:
    with cpu.cuda_requests_on_cpu():
        wanted = without_absent_extra_states(
            {"model": unwrap(model[0]).sharded_state_dict()}, folder
        )
        load_weights(unwrap(model[0]), dist_checkpointing.load(wanted, str(folder))["model"])


def values(model: list[Any]) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in named_parameters(model)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_checkpoints_move_between_the_two(
    family: str, precision: str, tiny: Path, tmp_path: Path
) -> None:
    options = [*FAMILIES[family], f"precision={precision}", "model.ffn_hidden_size=96"]
    config = load_config(tiny, options)
    local_config = load_config(tiny, [*options, f"precision={precision.replace('fp8', 'bf16')}"])
    with single_process():
        theirs = build(config, transformer_engine=True)
        ours = build(local_config, transformer_engine=False)
        assert "transformer_engine" in module_types(theirs)
        assert "transformer_engine" not in module_types(ours)
        assert {n: p.shape for n, p in values(theirs).items()} == {
            n: p.shape for n, p in values(ours).items()
        }
        # The same weights, since both are drawn from (seed, name).
        assert all(torch.equal(p, values(ours)[n]) for n, p in values(theirs).items())
        for source, target in ((theirs, ours), (ours, theirs)):
            with torch.no_grad():
                for _, param in named_parameters(source):
                    param.normal_()
            name = "from_te" if source is theirs else "from_ours"
            if source is theirs:
                with pretended_gpu():
                    save(source, tmp_path / name)
            else:
                save(source, tmp_path / name)
            load(target, tmp_path / name)
            wanted = values(source)
            for parameter, value in values(target).items():
                assert torch.equal(value, wanted[parameter]), parameter
