import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers_for_tests import SENTENCES, huggingface_folder, real_data, sentencepiece_model

from megatron_wd.config import UserError
from megatron_wd.data.encoding import Rules
from megatron_wd.data.indexed_writer import SUFFIXES
from megatron_wd.data.inputs import Shard
from megatron_wd.data.prepare import prepare_corpus
from megatron_wd.data.quickstart import prepare_quickstart
from megatron_wd.data.shards import merge_shards
from megatron_wd.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *SENTENCES[:5],
    "",
    "spelled </s> and <s> and <|endoftext|> stay text",
    "日本語 🏳️‍🌈 naïve \u0301e\n\n\ttabs",
    *(f"{i} {SENTENCES[i % 5]}" for i in range(300)),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tokenizers")
    huggingface_folder(root / "hf")
    sentencepiece_model(root / "sp.model")
    return {"hf": str(root / "hf"), "sp": str(root / "sp.model")}


def write_jsonl(path: Path, documents: list[str] = DOCUMENTS, key: str = "text") -> str:
    lines = (json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(documents))
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
    (description,) = prepare_corpus(*args, **kwargs).outputs.values()
    return description


def contents(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def read_back(prefix: Path | str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def left_behind(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix in (*SUFFIXES, ".partial"))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", ["hf", "sp"])
def test_every_document_ends_once_and_only_there(
    tokenizers: dict[str, str], tmp_path: Path, kind: str, fast: bool
) -> None:
    tokenizer = load_tokenizer(tokenizers[kind])
    source = write_jsonl(tmp_path / "a.jsonl")
    description = prepare([source], str(tmp_path / "out"), tokenizer, fast=fast, workers=1)
    found = read_back(tmp_path / "out")
    texts = [text for text in DOCUMENTS if text]
    expected = [ids.tolist() for ids in tokenizer.encode_reference(texts)]
    assert found == [[*ids, tokenizer.eos_id] for ids in expected]
    assert all(document.count(tokenizer.eos_id) == 1 for document in found)
    assert description["documents"] == len(texts) and description["empty_documents"] == 1
    assert description["tokens"] == sum(map(len, found))
    assert description["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert description["tokenizer"] == tokenizer.identity()
    assert json.loads((tmp_path / "out.json").read_text()) == description


@pytest.mark.parametrize("vocab_size", [65499, 65500])
def test_bytes_equal_those_of_megatrons_builder(tmp_path: Path, vocab_size: int) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    from megatron_wd.data.indexed_writer import IndexedWriter, token_dtype

    rng = np.random.default_rng(0)
    documents = [rng.integers(0, vocab_size, n) for n in rng.integers(1, 50, 300)]
    builder = IndexedDatasetBuilder(str(tmp_path / "b.bin"), DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "b.idx"))
    with IndexedWriter(str(tmp_path / "a"), token_dtype(vocab_size)) as writer:
        for part in (documents[:7], documents[7:]):
            tokens = np.concatenate(part).astype(token_dtype(vocab_size)).tobytes()
            writer.add(tokens, np.array([len(d) for d in part], dtype=np.int32).tobytes())
        writer.finish({})
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_every_format_and_any_number_of_workers_give_the_same_bytes(
    tokenizers: dict[str, str], tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = write_jsonl(tmp_path / "a.jsonl")
    data = Path(source).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n\n").strip())
    table = pa.table({"n": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=37)
    with pa.CompressedOutputStream(str(tmp_path / "e.json.zst"), "zstd") as stream:
        stream.write(data)
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "texts" / f"{i:05d}.txt").write_bytes(text.encode())
    for i, half in enumerate((DOCUMENTS[:100], DOCUMENTS[100:])):
        write_jsonl(tmp_path / f"half{i}.json", half)
    cases = {
        "a.jsonl": 3, "b.jsonl.gz": 2, "c.jsonl": 1, "d.parquet": 2, "e.json.zst": 1, "texts": 2,
        "half*.json": 1, "hf:json": 1,
    }  # fmt: skip
    expected = None
    for name, workers in cases.items():
        if name == "hf:json":
            (tmp_path / "hub").mkdir()
            write_jsonl(tmp_path / "hub" / "train.jsonl")
            inputs = [f"hf:{tmp_path / 'hub'}"]
        else:
            inputs = [str(tmp_path / name)]
        out = tmp_path / "out"
        description = prepare(inputs, str(out), tokenizers["hf"], workers=workers, force=True)
        expected = expected or contents(out)
        assert contents(out) == expected, name
        assert description["empty_documents"] == 1, name


def test_order_survives_many_small_chunks(
    tokenizers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    prepare([source], str(tmp_path / "whole"), tokenizers["sp"], workers=1)
    monkeypatch.setattr("megatron_wd.data.readers.plan_chunks.__defaults__", (100,))
    prepare([source], str(tmp_path / "small"), tokenizers["sp"], workers=3)
    assert contents(tmp_path / "small") == contents(tmp_path / "whole")


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("form", ["jsonl", "mixed"])
def test_merged_shards_are_the_unsharded_corpus(
    tokenizers: dict[str, str], tmp_path: Path, form: str, count: int
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    inputs = [write_jsonl(tmp_path / "a.jsonl")]
    if form == "mixed":
        (tmp_path / "b.txt").write_text("a text file")
        pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "c.parquet", row_group_size=50)
        (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(Path(inputs[0]).read_bytes()))
        (tmp_path / "e.txt").write_text("")
        inputs += [str(tmp_path / name) for name in ("b.txt", "c.parquet", "d.jsonl.gz", "e.txt")]
    arguments = {"tokenizer": tokenizers["sp"], "workers": 1}
    whole = prepare(inputs, str(tmp_path / "whole"), **arguments)
    for i in reversed(range(count)):
        prepare(inputs, str(tmp_path / "out"), shard=Shard(i, count), **arguments)
    merged = merge_shards(str(tmp_path / "out"), remove=True)
    assert merged == whole
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob("out-*"))


def test_merge_refuses_what_does_not_belong_together(
    tokenizers: dict[str, str], tmp_path: Path
) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl"), str(tmp_path / "out")

    def make(index: int, count: int = 3, tokenizer: str = "sp", **kwargs: Any) -> None:
        shard = Shard(index, count)
        prepare([source], out, tokenizers[tokenizer], shard=shard, workers=1, force=True, **kwargs)

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            merge_shards(out)
        assert not any(os.path.exists(out + suffix) for suffix in SUFFIXES)

    refused("no shards")
    make(0)
    make(2)
    refused("missing or incomplete: 1/3")
    make(1, tokenizer="hf")
    refused("tokenizer of .*00001-of-00003")
    make(1, rules=Rules(on_error="skip"))
    refused("rules of")
    make(1)
    make(0, 2)
    refused("splits into 2 and 3")
    for path in tmp_path.glob("out-*-of-00002.*"):
        path.unlink()
    shard = tmp_path / "out-00001-of-00003.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    refused("do not fit together")
    make(1)
    assert merge_shards(out)["documents"] == len(DOCUMENTS) - 1


def test_validation_documents_are_chosen_by_their_text(
    tokenizers: dict[str, str], tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*DOCUMENTS, *DOCUMENTS])
    rules = Rules(validation_fraction=0.2)
    tokenizer = load_tokenizer(tokenizers["hf"])
    prepare_corpus([source], str(tmp_path / "out"), tokenizer, rules=rules, workers=1)
    train = {tuple(d) for d in read_back(tmp_path / "out-train")}
    valid = {tuple(d) for d in read_back(tmp_path / "out-valid")}
    assert not train & valid and 0.1 < len(valid) / len(train | valid) < 0.3
    assert {tokenizer.decode(d[:-1]) for d in train | valid} == {d for d in DOCUMENTS if d}


# Bad input: what is wrong, and words of the one message.
BAD_LINES = {
    b'{"text": "a"}\n{"text": broken}\n': r"a\.jsonl:2 \(byte 14\): not valid JSON",
    b'{"text": "a"}\n\n{"body": "b"}\n': r"a\.jsonl:3 .*no field 'text' \(--text-key\).*body",
    b'{"text": 3}\n': r"a\.jsonl:1 .*holds int, not text",
    b'["text"]\n': r"a\.jsonl:1 .*expected a JSON object, found list",
    b'{"text": "a"}\n{"text": "\xff"}\n': r"a\.jsonl:2 .*invalid UTF-8.*replace or skip",
    b'{"text": "half \\ud83d"}\n': r"a\.jsonl:1 .*half a surrogate pair",
    b'{"text": ""}\n': "no tokens: 1 empty and 0 skipped",
    b"": "no tokens",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("data", BAD_LINES)
def test_bad_lines_are_named_and_nothing_is_left(
    tokenizers: dict[str, str], tmp_path: Path, data: bytes, packed: bool
) -> None:
    message = BAD_LINES[data]
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    if packed:
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(data))
        message = re.sub(r" \\\(byte \d+\\\)", "", message).replace(r"a\.jsonl:", r"a\.jsonl\.gz:")
        message = message.replace(" .*", ".*")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=message):
        prepare([str(path)], str(tmp_path / "out" / "x"), tokenizers["hf"], workers=2)
    assert left_behind(tmp_path / "out") == []


def test_bad_documents_can_be_skipped_or_mended(tokenizers: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ab"}\n{"text": "\xff"}\n{"text": "half \\ud83d"}\nnot JSON\n')
    out, tokenizer = str(tmp_path / "out"), load_tokenizer(tokenizers["hf"])
    skipped = prepare([str(path)], out, tokenizer, rules=Rules(on_error="skip"), workers=1)
    assert (skipped["documents"], skipped["skipped_documents"]) == (1, 3)
    path.write_bytes(path.read_bytes().replace(b"not JSON\n", b""))
    replaced = prepare(
        [str(path)], out, tokenizer, rules=Rules(on_error="replace"), workers=1, force=True
    )
    assert (replaced["documents"], replaced["replaced_documents"]) == (3, 2)
    texts = [tokenizer.decode(document[:-1]) for document in read_back(out)]
    assert texts == ["ab", "\ufffd", "half \ufffd"]


def test_unusable_inputs_are_named(tokenizers: dict[str, str], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "a.data").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_text("not parquet")
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(Path(good).read_bytes())[:-20])
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    pq.write_table(pa.table({"body": ["a"], "number": [1]}), tmp_path / "t.parquet")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("missing.jsonl", {}, "missing.jsonl: no such file or folder"),
        ("*.nothing", {}, "matches no file"),
        ("empty", {}, "holds no file of a known type"),
        ("a.data", {}, "cannot tell its type.*--format"),
        ("bad.parquet", {}, "damaged or not a Parquet file"),
        ("bad.jsonl.gz", {}, "damaged or cut off"),
        ("latin.txt", {}, "latin.txt: invalid UTF-8 at byte 1"),
        ("t.parquet", {}, "no column 'text' .*body, number"),
        ("t.parquet", {"rules": Rules("number")}, "holds int64, not text"),
        ("a.jsonl", {"workers": 0}, "--workers 0"),
        ("a.jsonl", {"input_format": "xml"}, "--format xml"),
        ("a.jsonl", {"rules": Rules(on_error="ignore")}, "--on-error ignore"),
        ("a.jsonl", {"rules": Rules(validation_fraction=1)}, "--validation-fraction 1"),
        ("a.jsonl", {"tokenizer": str(tmp_path / "none")}, "none: no such file or folder"),
        ("a.jsonl", {"output": str(tmp_path / "a.data" / "x")}, "cannot write"),
    ]
    for name, change, message in cases:
        arguments = {"output": str(tmp_path / "out"), "tokenizer": tokenizers["hf"], "workers": 1}
        with pytest.raises(UserError, match=message):
            prepare_corpus([str(tmp_path / name)], **(arguments | change))
        assert left_behind(tmp_path) == ["t.parquet"] or not list(tmp_path.glob("out*")), name
    for text in ("3", "a/b", "2/2", "-1/2", "0/0"):
        with pytest.raises(UserError, match="--shard"):
            Shard.parse(text)


def test_nothing_is_overwritten_unless_forced(tokenizers: dict[str, str], tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl"), str(tmp_path / "out")
    prepare([source], out, tokenizers["hf"], workers=1)
    before = contents(out)
    with pytest.raises(UserError, match=r"out\.bin.*--force"):
        prepare([source], out, tokenizers["sp"], workers=1)
    assert contents(out) == before
    prepare([source], out, tokenizers["sp"], workers=1, force=True)
    assert contents(out) != before


def test_full_disk_is_one_message_and_leaves_nothing(
    tokenizers: dict[str, str], tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS * 20)
    code = (
        "import resource, signal, sys, errno, os\n"
        "from megatron_wd.data import indexed_writer\n"
        "from megatron_wd.data.prepare import prepare_corpus\n"
        # A file size limit is met like a full disk: in the middle of a write, by the kernel.
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "prepare_corpus([sys.argv[1]], sys.argv[2], sys.argv[3], workers=1)\n"
    )
    (tmp_path / "out").mkdir()
    arguments = [source, str(tmp_path / "out" / "x"), tokenizers["hf"]]
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment(),
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode and "UserError: cannot write" in done.stderr, done.stderr
    assert left_behind(tmp_path / "out") == []


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def start_tool(*arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tools" / "prepare_data.py"), *arguments]
    return subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **kwargs)  # fmt: skip


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_leaves_nothing_that_looks_complete(
    tokenizers: dict[str, str], tmp_path: Path, sent: signal.Signals
) -> None:
    # The reference encoder is slow enough to be interrupted in the middle.
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS * 300)
    arguments = ["--input", source, "--output", str(tmp_path / "out"), "--reference",
                 "--tokenizer", tokenizers["hf"], "--workers", "2"]  # fmt: skip
    process = start_tool(*arguments, start_new_session=True)
    written = tmp_path / "out.bin.partial"
    deadline = time.monotonic() + 30
    while not (written.exists() and written.stat().st_size) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers = children_of(process.pid)
    assert len(workers) >= 2
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as the terminal does it
    else:
        process.send_signal(sent)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    complete = {"out" + suffix for suffix in SUFFIXES}
    assert not complete & {p.name for p in tmp_path.iterdir()}
    if sent == signal.SIGINT:
        assert "Traceback" not in errors and not list(tmp_path.glob("out*"))
    while any(is_running(pid) for pid in workers):  # nobody stays behind
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # What a killed run left does not disturb the next one.
    prepare([write_jsonl(tmp_path / "b.jsonl")], str(tmp_path / "out"), tokenizers["hf"], workers=1)
    assert not list(tmp_path.glob("*.partial"))


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    if not path.exists():
        pytest.skip("needs Linux's /proc")
    return [int(child) for child in path.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_command_line_reports_and_refuses(tokenizers: dict[str, str], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    arguments = ["--input", source, "--output", str(tmp_path / "out"), "--tokenizer",
                 tokenizers["hf"], "--json"]  # fmt: skip
    output, errors = (first := start_tool(*arguments)).communicate()
    assert first.returncode == 0 and errors == "", errors
    assert json.loads(output)["outputs"][str(tmp_path / "out")]["documents"] == len(DOCUMENTS) - 1
    output, errors = (second := start_tool(*arguments)).communicate()
    assert second.returncode == 2 and output == ""
    assert errors.startswith("error: ") and len(errors.splitlines()) == 1
    merge = start_tool("merge", "--output", str(tmp_path / "none"))
    assert "no shards" in merge.communicate()[1] and merge.returncode == 2


def test_help_needs_neither_torch_nor_transformers() -> None:
    for tool in ("prepare_data.py", "prepare_quickstart.py"):
        code = (
            "import runpy, sys\n"
            f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
            f"sys.argv = [{tool!r}, '--help']\n"
            "try:\n"
            f"    runpy.run_path({str(ROOT / 'tools' / tool)!r}, run_name='__main__')\n"
            "finally:\n"
            "    loaded = {'torch', 'transformers', 'datasets', 'megatron.core'} & "
            "set(sys.modules)\n"
            "    assert not loaded, loaded\n"
        )
        done = subprocess.run([sys.executable, "-c", code], env=environment(),
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_quickstart_is_complete_deterministic_and_made_once(tmp_path: Path) -> None:
    root = tmp_path / "stdlib"
    (root / "site-packages").mkdir(parents=True)
    (root / "site-packages" / "other.py").write_text("not ours")
    rng = random.Random(0)
    # Many distinct words that come back, so that there are enough pieces to learn.
    vocabulary = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(3000)]
    for i in range(120):
        words = " ".join(rng.choices(vocabulary, k=300))
        (root / f"m{i}.py").write_text(f'"""Module {i}."""\n\nif x:\n\tself.y = "{words}"\n')
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (root / "empty.py").write_text("")
    said: list[str] = []
    first = prepare_quickstart(tmp_path / "q", root=str(root), workers=1, say=said.append)
    total = {k: first["train"][k] + first["valid"][k] for k in first["train"]}
    assert total["documents"] == 120 and first["valid"]["documents"] > 0
    assert (total["skipped_documents"], total["empty_documents"]) == (1, 1)
    assert prepare_quickstart(tmp_path / "q", root=str(root), say=said.append) == first
    assert "complete already" in said[-1]
    tokenizer = load_tokenizer(tmp_path / "q" / "tokenizer.model")
    documents = read_back(tmp_path / "q" / "train") + read_back(tmp_path / "q" / "valid")
    texts = {p.read_text("utf-8") for p in root.glob("m*.py")}
    assert {tokenizer.decode(d[:-1]) for d in documents} == texts
    prepare_quickstart(tmp_path / "again", root=str(root), workers=2, say=said.append)
    for name in first["files"]:
        assert (tmp_path / "q" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    (tmp_path / "q" / "valid.idx").unlink()
    prepare_quickstart(tmp_path / "q", root=str(root), workers=1, say=said.append)
    assert (tmp_path / "q" / "valid.idx").exists()
    (tmp_path / "q" / "quickstart.json").unlink()
    with pytest.raises(UserError, match="not made by this tool"):
        prepare_quickstart(tmp_path / "q", root=str(root), say=said.append)
    with pytest.raises(UserError, match="too few to train on"):
        prepare_quickstart(tmp_path / "r", root=str(tmp_path / "again"), say=said.append)


@pytest.mark.parametrize("name", ["dolma2", "mistral_v1.model"])
def test_real_corpus_is_encoded_as_by_the_reference(name: str, tmp_path: Path) -> None:
    data = real_data()
    tokenizer = load_tokenizer(data / "tokenizers" / name)
    sources = [str(data / "corpora" / f"{corpus}.jsonl") for corpus in ("owt", "wikipedia")]
    result = prepare_corpus(sources, str(tmp_path / "out"), tokenizer)
    assert result.fast_tokenizer
    lines = [line for source in sources for line in Path(source).read_bytes().splitlines()]
    texts = [json.loads(line)["text"] for line in lines]
    expected = [[*i.tolist(), tokenizer.eos_id] for i in tokenizer.encode_reference(texts)]
    assert read_back(tmp_path / "out") == expected
