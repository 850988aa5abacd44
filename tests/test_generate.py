"""Text from an export."""

import shutil

import pytest
import torch
from megatron_checkpoint import make_run

from megatron_wd.config import UserError
from megatron_wd.convert.to_hf import export_checkpoint
from megatron_wd.evals.generate import generate


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("exported")
    run, model = make_run(tmp_path)
    export_checkpoint(run, tmp_path / "hf")
    return tmp_path / "hf", model


def test_greedy_text_is_the_most_likely_token_each_time(exported):
    folder, model = exported
    (text,) = generate(folder, "w7 w8 w9", max_new_tokens=3, temperature=None)
    tokens = [7, 8, 9]
    for _ in range(3):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert text.split() == [f"w{token}" for token in tokens[3:]]


def test_samples_follow_their_seed(exported):
    folder, _ = exported
    options = {"max_new_tokens": 5, "num_samples": 3, "temperature": 1.0}
    first = generate(folder, "w7", seed=1, **options)
    assert len(first) == 3
    assert generate(folder, "w7", seed=1, **options) == first
    assert generate(folder, "w7", seed=2, **options) != first
    assert generate(folder, "", seed=1, **options)


def test_text_longer_than_the_model_is_an_error(exported):
    with pytest.raises(UserError, match="64 tokens that the model"):
        generate(exported[0], "w7 w8", max_new_tokens=63)


def test_a_folder_without_a_model_is_an_error(exported, tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        generate(tmp_path / "nowhere", "w7")
    with pytest.raises(UserError, match=r"no config\.json"):
        generate(tmp_path, "w7")
    shutil.copytree(exported[0], tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot be loaded"):
        generate(tmp_path / "copy", "w7")
