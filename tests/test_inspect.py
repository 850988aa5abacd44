"""What `inspect` says of each kind of folder."""

import subprocess
import sys

import torch
from megatron_checkpoint import make_run, random_model, run_tool, save_hf

from megatron_wd.config import num_parameters
from megatron_wd.convert.from_hf import import_folder
from megatron_wd.convert.inspection import describe, inspect_folder
from megatron_wd.convert.to_hf import export_checkpoint
from megatron_wd.convert.weights import open_weights


def test_a_run_and_its_export(tmp_path):
    run, model = make_run(tmp_path, num_ranks=2, steps=(10, 20))
    (run / "provenance.json").write_text('{"git_commit": "abc", "layout": {"tensor": 2}}')
    facts = inspect_folder(run)
    assert (facts["kind"], facts["family"], facts["step"]) == ("checkpoint", "llama2", 20)
    assert (facts["steps"], facts["tokens"], facts["layout"]) == ([10, 20], 5120, {"tensor": 2})
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["optimizer_state"] and facts["dtype"] == "float32"
    assert facts["tokenizer"] == {"kind": "huggingface", "vocab_size": 251, "eos_id": 2}
    text = describe(facts)
    for fact in ("step 20", "10, 20", "tensor 2", "learning rate 0.003", "weight decay 0.7", "abc"):
        assert fact in text
    assert inspect_folder(run, step=10)["tokens"] == 2560
    export_checkpoint(run, tmp_path / "hf", dtype="bf16")
    facts = inspect_folder(tmp_path / "hf")
    assert (facts["dtype"], facts["tokens"], facts["weight_decay"]) == ("bfloat16", 5120, 0.7)


def test_a_hugging_face_folder_and_its_import(tmp_path):
    hf = save_hf(tmp_path / "hf", random_model("gpt2", 4, True), torch.bfloat16)
    import_folder(hf, tmp_path / "mcore")
    first, second = inspect_folder(hf), inspect_folder(tmp_path / "mcore")
    assert first["kind"] == "Hugging Face folder" and "from a Hugging Face" in second["kind"]
    assert second["source"] == "hf" and second["step"] is None and not second["optimizer_state"]
    assert {first["parameters"], second["parameters"]} == {num_parameters(open_weights(hf).model)}
    same = ("family", "dtype", "max_positions", "tie_embeddings", "rope_theta", "tokenizer")
    assert all(first[key] == second[key] for key in same)
    assert "none" not in describe(first)


def test_it_loads_no_torch(tmp_path):
    run, _ = make_run(tmp_path)
    code = (
        f"import sys; from megatron_wd.convert.inspection import inspect_folder\n"
        f"inspect_folder({str(run)!r}); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = run_tool("convert.py", "inspect", run)
    assert shown.returncode == 0 and "vocabulary 251" in shown.stdout
    wrong = run_tool("convert.py", "inspect", tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ")
