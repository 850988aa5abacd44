"""One model, one loss, on every layout; and a checkpoint that moves between them."""

import shutil
from pathlib import Path

import pytest
from ranks import metrics, results_of, run_config

LAYOUTS = {
    "tp1": (1, []),
    "tp2": (2, ["parallel.tensor=2"]),
    "tp2+sp": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "pp2 interleaved": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "dp2": (2, ["parallel.distributed_optimizer=false"]),
    "dp2 distributed optimizer": (2, []),
    "tp2 pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
}


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Path:
    """The run on one rank that every layout is compared with; saved half-way too."""
    run_dir = tiny.parent / "tp1"
    assert run_config(1, tiny, f"run_dir={run_dir}", "checkpoint.every_steps=10") == [0]
    return run_dir


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "tp1"])
def test_losses_agree_on_every_layout(layout: str, tiny: Path, reference: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    run_dir = tiny.parent / layout
    assert run_config(ranks, tiny, f"run_dir={run_dir}", *overrides) == [0] * ranks
    assert_close(run_dir, reference, 1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout", ["tp1", "tp2+sp", "pp2 interleaved", "dp2 distributed optimizer"]
)
def test_a_checkpoint_goes_on_on_another_layout(layout: str, tiny: Path, reference: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    run_dir = tiny.parent / f"resumed {layout}"
    shutil.copytree(reference, run_dir)
    forget_after(run_dir, 10)
    assert run_config(ranks, tiny, f"run_dir={run_dir}", *overrides) == [0] * ranks
    if layout == "tp1":  # the same layout: the same bits
        assert results_of(run_dir) == results_of(reference)
    assert_close(run_dir, reference, 1e-5)


@pytest.mark.distributed
def test_recomputation_and_tied_embeddings_change_no_layout(tiny: Path) -> None:
    tied = ["model.tie_embeddings=true", "train.steps=6", "evaluate.every_steps=6"]
    one, two = tiny.parent / "tied", tiny.parent / "tied pp2"
    assert run_config(1, tiny, f"run_dir={one}", *tied) == [0]
    layout = ["parallel.pipeline=2", "train.recompute=full"]
    assert run_config(2, tiny, f"run_dir={two}", *tied, *layout) == [0, 0]
    assert_close(two, one, 1e-5)


@pytest.mark.distributed
def test_bf16_trains_alike_under_tensor_parallelism(tiny: Path, reference: Path) -> None:
    run_dir = tiny.parent / "bf16"
    layout = ["parallel.tensor=2", "parallel.sequence=true", "precision=bf16"]
    assert run_config(2, tiny, f"run_dir={run_dir}", *layout) == [0, 0]
    assert_close(run_dir, reference, 0.05)
    final, first = metrics(run_dir)[20]["loss/train"], metrics(run_dir)[1]["loss/train"]
    assert final < first - 0.3


@pytest.mark.distributed
def test_dropout_resumes_bit_for_bit_over_two_restarts(tiny: Path) -> None:
    options = ["model.dropout=0.2", "train.steps=9", "parallel.tensor=2", "parallel.sequence=true"]
    whole, parts = tiny.parent / "dropout whole", tiny.parent / "dropout parts"
    saving = ["checkpoint.every_steps=3", "checkpoint.async_save=true"]
    assert run_config(2, tiny, f"run_dir={whole}", *options, *saving) == [0, 0]
    shutil.copytree(whole, parts)
    for step in (3, 6):
        forget_after(parts, step)
        assert run_config(2, tiny, f"run_dir={parts}", *options, *saving) == [0, 0]
    assert results_of(parts) == results_of(whole)
    losses = [row["loss/train"] for row in metrics(whole).values()]
    plain = tiny.parent / "no dropout"
    assert run_config(2, tiny, f"run_dir={plain}", *options[1:]) == [0, 0]
    assert losses != [row["loss/train"] for row in metrics(plain).values()], "dropout did nothing"


def forget_after(run_dir: Path, step: int) -> None:
    """As if the run had been killed after saving a step: later checkpoints go, later rows stay."""
    folder = run_dir / "checkpoints"
    for checkpoint in folder.glob("iter_*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")


def assert_close(run_dir: Path, reference: Path, tolerance: float) -> None:
    ours, theirs = metrics(run_dir), metrics(reference)
    assert list(ours) == list(theirs)
    for step, row in theirs.items():
        for key in ("loss/train", "loss/valid"):
            if key in row:
                difference = abs(ours[step][key] - row[key])
                assert difference <= tolerance, f"{key} at step {step} differs by {difference:.2e}"
        for key in row if tolerance < 1e-4 else ():
            if key.split("/")[0] in MEASURES:
                found, wanted = ours[step][key], row[key]
                assert abs(found - wanted) <= 1e-6 * max(1.0, wanted), f"{key}: {found} {wanted}"
        if "weight_norm/all" in row:
            assert_squares_add_up(ours[step])


MEASURES = {
    *("effective_lr", "effective_lr_by_layer", "decay_share", "relaxed", "weight_norm"),
    *("gradient_norm", "update_norm", "weight_norm_by_layer", "equilibrium_effective_lr"),
}


def assert_squares_add_up(row: dict[str, float]) -> None:
    """The kinds' squared norms make up those of everything, and that of the gradient which is clipped."""
    for name in ("weight_norm", "gradient_norm", "update_norm"):
        parts = [v**2 for k, v in row.items() if k.startswith(f"{name}/") and k != f"{name}/all"]
        assert sum(parts) ** 0.5 == pytest.approx(row[f"{name}/all"], rel=1e-9)
    assert row["gradient_norm/all"] == pytest.approx(row["grad_norm"], rel=1e-6)
