"""What stops an export: one message, nothing executed, no folder left behind."""

import os
import pickle
import shutil

import pytest
import torch
from megatron_checkpoint import make_run, write_dcp, write_tokenizer

from megatron_wd.config import UserError
from megatron_wd.convert.dcp import TensorFolder
from megatron_wd.convert.to_hf import export_checkpoint


def export_error(tmp_path, source, **options):
    with pytest.raises(UserError) as caught:
        export_checkpoint(source, tmp_path / "hf", **options)
    assert not (tmp_path / "hf").exists()
    assert not list(tmp_path.glob(".hf*"))
    return str(caught.value)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    def change(tensors):
        del tensors["decoder.layers.2.self_attention.linear_proj.weight"]
        tensors["decoder.layers.0.self_attention.q_norm.weight"] = torch.ones(8)
        tensors["decoder.final_norm.weight"] = torch.ones(31)

    run, _ = make_run(tmp_path, change=change)
    message = export_error(tmp_path, run)
    assert "missing: decoder.layers.2.self_attention.linear_proj.weight" in message
    assert "not part of the model: decoder.layers.0.self_attention.q_norm.weight" in message
    assert "decoder.final_norm.weight has [31] instead of [32]" in message


def test_an_output_layer_in_a_tied_model_is_an_extra_tensor(tmp_path):
    def change(tensors):
        tensors["output_layer.weight"] = torch.ones(256, 32)

    run, _ = make_run(tmp_path, tied=True, change=change)
    assert "not part of the model: output_layer.weight" in export_error(tmp_path, run)


def test_half_a_checkpoint_is_refused(tmp_path):
    run, _ = make_run(tmp_path, num_ranks=2)
    folder = run / "checkpoints" / "iter_0000020"
    data = folder / "__1_0.distcp"
    whole = data.read_bytes()

    data.write_bytes(whole[: len(whole) // 2])
    assert "__1_0.distcp has" in export_error(tmp_path, run)
    damaged = bytearray(whole)
    damaged[100:400] = bytes(300)
    data.write_bytes(damaged)
    assert "__1_0.distcp" in export_error(tmp_path, run)
    data.unlink()
    assert "__1_0.distcp is missing" in export_error(tmp_path, run)
    data.write_bytes(whole)
    index = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(index[: len(index) // 2])
    assert ".metadata is damaged" in export_error(tmp_path, run)
    (folder / ".metadata").unlink()
    assert "not a complete checkpoint" in export_error(tmp_path, run)


def test_a_folder_that_does_not_describe_itself_is_refused(tmp_path):
    run, _ = make_run(tmp_path, layers=1)
    folder = run / "checkpoints" / "iter_0000020"
    (folder / "tokenizer").rename(tmp_path / "tokenizer")
    assert "--tokenizer" in export_error(tmp_path, run)
    (folder / "config.yaml").unlink()
    assert "no config.yaml" in export_error(tmp_path, run)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    assert "there are: 20" in export_error(tmp_path, run)
    assert "does not exist" in export_error(tmp_path, tmp_path / "nowhere")
    assert "no finished checkpoint" in export_error(tmp_path, tmp_path / "tokenizer")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    run, _ = make_run(tmp_path, layers=1)
    write_tokenizer(tmp_path / "large", 300)
    message = export_error(tmp_path, run, tokenizer=tmp_path / "large")
    assert "300 tokens, but the model only 251" in message


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_malicious_pickle_does_not_run(tmp_path):
    run, _ = make_run(tmp_path, layers=1)
    folder = run / "checkpoints" / "iter_0000020"
    trap = tmp_path / "executed"

    index = folder / ".metadata"
    good = index.read_bytes()
    index.write_bytes(pickle.dumps(_Evil(trap)))
    assert "posix.mkdir" in export_error(tmp_path, run)
    # A dotted name, which pickle would follow through the attributes of an allowed module.
    index.write_bytes(b"\x80\x04\x8c\x05torch\x8c\x0bserialize.x\x93.")
    assert "torch.serialize.x" in export_error(tmp_path, run)
    index.write_bytes(good)

    write_dcp(tmp_path / "evil", {"embedding.word_embeddings.weight": _EvilTensor.make(trap)})
    shutil.copy(tmp_path / "evil" / "__0_0.distcp", folder / "__0_0.distcp")
    shutil.copy(tmp_path / "evil" / ".metadata", index)
    with pytest.raises(UserError, match=r"embeddings\.weight cannot be read"):
        TensorFolder(folder).read("embedding.word_embeddings.weight")
    assert not trap.exists()


class _EvilTensor(torch.Tensor):
    """A tensor whose pickle runs a command."""

    @staticmethod
    def make(path):
        tensor = torch.ones(4, 4).as_subclass(_EvilTensor)
        tensor.trap = path
        return tensor

    def chunk(self, *_args, **_kwargs):
        return [self]

    def clone(self):
        return self

    def __reduce_ex__(self, protocol):
        return os.mkdir, (str(self.trap),)


def test_an_index_that_points_outside_is_refused(tmp_path):
    write_dcp(tmp_path / "dcp", {"a": torch.ones(2, 2)})
    index = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../secret"
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="outside the checkpoint"):
        TensorFolder(tmp_path / "dcp")


def test_parts_that_leave_a_hole_are_refused(tmp_path):
    write_dcp(tmp_path / "dcp", {"a": torch.ones(4, 2)}, num_ranks=2)
    index = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.state_dict_metadata["a"].chunks.pop()
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="parts of tensor a do not make up the whole"):
        TensorFolder(tmp_path / "dcp")


def test_an_existing_folder_is_kept_unless_it_is_an_earlier_export(tmp_path):
    run, _ = make_run(tmp_path, layers=1)
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(run, out)  # an empty folder is fine
    with pytest.raises(UserError, match="--force"):
        export_checkpoint(run, out)
    (out / "model.safetensors").write_bytes(b"old")
    export_checkpoint(run, out, force=True)
    assert (out / "model.safetensors").stat().st_size > 10_000
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        export_checkpoint(run, out, force=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="does not look like an export"):
        export_checkpoint(run, tmp_path / "precious", force=True)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "mine"
