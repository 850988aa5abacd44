"""Training that starts from weights: from a Hugging Face folder, from a run, on any layout."""

import json
from pathlib import Path

import pytest
from ranks import metrics, run_config
from test_families import FAMILIES
from test_layouts import LAYOUTS

STILL = ["train.steps=1", "optim.warmup_steps=0", "optim.lr=1e-15", "optim.weight_decay=0.0"]


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_run_and_of_its_export_go_on_on_other_layouts(family: str, tiny: Path) -> None:
    from megatron_wd.convert.to_hf import export_checkpoint

    first, export = tiny.parent / f"{family} first", tiny.parent / f"{family} export"
    options = [*FAMILIES[family], "train.steps=6"]
    assert run_config(1, tiny, f"run_dir={first}", *options) == [0]
    export_checkpoint(first, export)
    wanted = metrics(first)[6]["loss/valid"]
    for source, layout in ((first, "tp2+sp"), (export, "tp2 pp2"), (export, "pp2 interleaved")):
        ranks, overrides = LAYOUTS[layout]
        run_dir = tiny.parent / f"{family} from {source.name} {layout}"
        arguments = [f"run_dir={run_dir}", f"init_from={source}", *FAMILIES[family], *STILL]
        assert run_config(ranks, tiny, *arguments, *overrides) == [0] * ranks
        assert metrics(run_dir)[1]["loss/valid"] == pytest.approx(wanted, abs=1e-5), layout


@pytest.mark.distributed
def test_another_model_or_tokenizer_is_refused(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    first = tiny.parent / "source"
    assert run_config(1, tiny, f"run_dir={first}", "train.steps=5") == [0]
    never = [f"run_dir={tmp_path / 'never'}", f"init_from={first}"]
    capfd.readouterr()
    assert run_config(1, tiny, *never, "model.norm_eps=1e-6", "model.num_query_groups=4") == [2]
    error = capfd.readouterr().err
    assert "model.norm_eps: 1e-05 there, 1e-06 in this config" in error
    assert "key/value heads): 2 there, 4 in this config" in error
    assert run_config(1, tiny, f"run_dir={first}", f"init_from={first}/checkpoints") == [2]
    assert "a run cannot start from itself" in capfd.readouterr().err
    (checkpoint,) = (first / "checkpoints").glob("iter_*")
    file = checkpoint / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["~"] = vocabulary["~"], vocabulary["e"]
    file.write_text(json.dumps(content))
    assert run_config(1, tiny, *never) == [2]
    assert "another tokenizer" in capfd.readouterr().err
