"""From rows to token ids: templates, lengths, labels; what is refused, and what the message says."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny import write_tokenizer

from megatron_wd.config import UserError
from megatron_wd.finetune.schema import FinetuneConfig, accumulation_steps, load_finetune_config
from megatron_wd.finetune.task import Example, RowCounts, read_examples
from megatron_wd.finetune.tokens import (
    IGNORED,
    DataReport,
    Encoder,
    Samples,
    as_dataset,
    prepare_samples,
)

ROOT = Path(__file__).resolve().parent.parent
PRESETS = sorted((ROOT / "configs" / "finetune").glob("*.yaml"))
EOS = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """One id per byte; EOS, no BOS, no padding token."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def config_of(
    tmp_path: Path, rows: list, *overrides: str, name: str = "rows.jsonl"
) -> FinetuneConfig:
    data, path = tmp_path / name, tmp_path / "config.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.write_text(
        f"run_dir: {tmp_path}/run\nmodel: {tmp_path}/model\noptim: {{lr: 1e-3}}\n"
        f"task: {{name: t, source: ['{data}']}}\n"
    )
    return load_finetune_config(path, overrides)


def examples_of(config: FinetuneConfig) -> list[Example]:
    return list(read_examples(config.task, RowCounts()))


def prepared(config: FinetuneConfig, tokenizer) -> tuple[Samples, DataReport]:  # type: ignore[no-untyped-def]
    samples, report, _ = prepare_samples(config, tokenizer)
    return samples, report


# Token ids and labels


def test_prompt_has_no_loss_and_the_end_is_learned(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    config = config_of(
        tmp_path, [{"prompt": "1+1", "response": " 2"}, {"prompt": "x", "response": "yes"}]
    )
    samples, report = prepared(config, tokenizer)
    given, answer = tokenizer("Human: 1+1\nAssistant:").input_ids, tokenizer(" 2").input_ids
    assert samples.input_ids[0].tolist() == [*given, *answer, EOS]
    assert samples.labels[0].tolist() == [IGNORED] * len(given) + [*answer, EOS]
    assert report.samples == 2 and report.response_tokens == len(answer) + 1 + len("yes") + 1
    rows = as_dataset(samples)
    assert rows[1]["input_ids"] == samples.input_ids[1].tolist()
    assert rows[1]["labels"] == samples.labels[1].tolist()


def test_trainer_computes_the_loss_of_responses(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron_wd.finetune.trainer import build_trainer

    rows = [{"prompt": f"{n} and", "response": f"so {n * 7}"} for n in range(4)]
    config = config_of(
        tmp_path,
        rows,
        "train.precision=fp32",
        "train.batch_samples=4",
        "train.micro_batch_samples=4",
    )
    samples, _ = prepared(config, tokenizer)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=251, num_attention_heads=2, **shape)).eval()
    tokenizer.pad_token = tokenizer.eos_token
    try:
        trainer = build_trainer(config, model, tokenizer, as_dataset(samples), 1)
        batch = next(iter(trainer.get_train_dataloader()))
    finally:
        tokenizer.pad_token = None
    decayed = set(trainer.get_decay_parameter_names(model))
    assert decayed == {name for name, p in model.named_parameters() if p.ndim == 2}
    with torch.no_grad():
        ours = trainer.compute_loss(model, dict(batch))
        logits = [
            model(torch.tensor(ids[None].astype(np.int64))).logits[0] for ids in samples.input_ids
        ]
    total, count = torch.tensor(0.0), 0
    for output, ids, labels in zip(logits, samples.input_ids, samples.labels, strict=True):
        for position in range(1, len(ids)):
            if labels[position] != IGNORED:
                total -= output[position - 1].log_softmax(-1)[ids[position]]
                count += 1
    assert ours.item() == pytest.approx((total / count).item(), rel=1e-5)


def test_text_that_spells_a_special_token_stays_text(tokenizer) -> None:  # type: ignore[no-untyped-def]
    ((prompt, response),) = Encoder(tokenizer, "{content}").encode(["a</s>b"], ["c</s>"])
    assert EOS not in prompt and response.count(EOS) == 1 and response[-1] == EOS


def test_a_bos_comes_first_where_the_tokenizer_puts_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, ":": 4}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    assert Encoder(fast, "{content}:").encode(["a"], ["b"]) == [([0, 2, 4], [3, 1])]


# Lengths


def long_rows() -> list[dict[str, str]]:
    return [{"prompt": "p", "response": "r" * n} for n in (3, 30, 50)]


def test_long_examples_are_refused_with_their_number(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    config = config_of(tmp_path, long_rows(), "cutoff_tokens=40")
    words = (
        r"2 of 3 examples are longer than cutoff_tokens 40 \(the longest has 70; .*rows\.jsonl:2"
    )
    with pytest.raises(UserError, match=words):
        prepare_samples(config, tokenizer)


def test_long_examples_are_dropped_when_asked(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    samples, report = prepared(
        config_of(tmp_path, long_rows(), "cutoff_tokens=40", "over_long=drop"), tokenizer
    )
    assert (report.samples, report.over_long, report.dropped, report.cut) == (1, 2, 2, 0)
    assert len(samples.input_ids[0]) == 23


def test_long_examples_are_cut_when_asked(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    rows = [*long_rows(), {"prompt": "p" * 40, "response": "r"}]
    samples, report = prepared(
        config_of(tmp_path, rows, "cutoff_tokens=40", "over_long=cut"), tokenizer
    )
    # The last one's prompt fills everything, so that nothing is left to learn.
    assert (report.samples, report.over_long, report.dropped, report.cut) == (3, 3, 1, 2)
    assert [len(ids) for ids in samples.input_ids] == [23, 40, 40]
    assert samples.input_ids[2][-1] != EOS


def test_empty_examples(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    rows = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "response": " "},
        {"prompt": "a", "response": None},
    ]
    with pytest.raises(
        UserError, match=r"2 of 3 examples have an empty prompt or response \(.*:2, .*:3\)"
    ):
        prepare_samples(config_of(tmp_path, rows), tokenizer)
    _, report = prepared(config_of(tmp_path, rows, "empty=drop"), tokenizer)
    assert (report.kept, report.empty, report.samples) == (3, 2, 1)
    with pytest.raises(UserError, match="no example is left"):
        prepare_samples(config_of(tmp_path, rows[1:], "empty=drop"), tokenizer)


# Rows


def test_missing_field_is_named_with_those_that_exist(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"question": "q", "answer": "a"}])
    with pytest.raises(
        UserError, match=r"rows\.jsonl:1: no field prompt, response.*has question, answer"
    ):
        examples_of(config)


def test_rows_come_from_json_lines_one_list_gzip_and_parquet(tmp_path: Path) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": str(i), "response": "r", "other": [i]} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.parquet"):
        config = config_of(tmp_path, [], f"task.source=['{tmp_path / name}']", name="unused.jsonl")
        assert [e.prompt for e in examples_of(config)] == ["0", "1", "2"], name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": 1}\n{"prompt"', "bad.jsonl:2: is no JSON"),
        ("[1, 2", "bad.jsonl: is no JSON"),
        ("3\n", "expected an object with fields, got int"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    config = config_of(
        tmp_path, [], f"task.source=['{tmp_path}/bad.jsonl']", "task.response='{{ prompt }}'"
    )
    with pytest.raises(UserError, match=words):
        examples_of(config)


def test_sources_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.source: nowhere\.jsonl: no such file"):
        examples_of(config_of(tmp_path, [], "task.source=[nowhere.jsonl]"))
    offline = config_of(tmp_path, [], "task.source=['hf:nobody/nothing']")
    words = (
        r"dataset nobody/nothing:train cannot be loaded(.|\n)*fields prompt, response and name the"
    )
    with pytest.raises(UserError, match=words):
        examples_of(offline)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.prompt='{{ prompt'", "task.prompt is no Jinja template"),
        ("task.response='{{ response[7] }}'", r"rows\.jsonl:1: task\.response cannot be filled in"),
        ("task.keep_if='response.x > 1'", r"rows\.jsonl:1: task\.keep_if cannot be filled in"),
        ("task.prompt='{{ prompt.__class__.__mro__ }}'", "cannot be filled in"),
    ],
)
def test_wrong_templates(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        examples_of(config_of(tmp_path, [{"prompt": "a", "response": {"b": 1}}], override))


# The tasks of the paper: one row of each, as the hub has it, and what the authors' code makes of it

FOUR = ["one", "two.", "three", "four"]
ROWS: dict[str, tuple[dict, str, str]] = {
    "metamathqa": ({"query": "q", "response": "r"}, "q", "r"),
    "simplescaling": (
        {"question": "q", "attempt": "so $\\boxed{2}$"},
        "q",
        "so $\\boxed{2}$",
    ),
    "medmcqa": (
        {"question": "Think. Question: Which?\nOptions:\nA. x", "response": "As.\n\nAnswer: A."},
        "Which?\nOptions:\nA. x",
        "As.\n\nAnswer: A.",
    ),
    "medmcqa_the_answer_is": (
        {"question": "Think. Question: Which?", "response": "As.\n\nAnswer: A."},
        "Which?",
        "As.\n\nThe answer is A.",
    ),
    "pubmedqa": (
        {
            "question": "Q?",
            "context": {"contexts": ["a.", "b."]},
            "long_answer": "L.",
            "final_decision": "no",
        },
        "Based on the paper abstract below, answer the following question with 'yes', 'maybe', or 'no'."
        "\n\nQuestion: Q?\n\nAbstract: a. b.",
        "The conclusion of the abstract is: L. Therefore, the answer is no.",
    ),
    "mmlu_pro_cot": (
        {
            "question": "Q?",
            "options": FOUR[:2],
            "cot_content": "so the answer is: B.",
            "answer": "B",
        },
        "Q?\nA. one\nB. two.",
        "so the answer is: B.",
    ),
    "race": (
        {"article": "Text.", "question": "Q?", "options": FOUR, "answer": "A"},
        "Answer the question below based only on the provided passage.\n\nPassage: Text.\n\nQuestion: Q?\n"
        "A. one\nB. two.\nC. three\nD. four",
        "one. Therefore, the answer is A.",
    ),
    "hellaswag": ({"ctx": "A man", "endings": FOUR, "label": "3"}, "A man", "four"),
    "winogrande": (
        {"sentence": "Ian ate as _ was hungry.", "option1": "Ian", "option2": "Dan", "answer": "2"},
        "Ian ate as Dan",
        "was hungry.",
    ),
    "piqa": ({"goal": "G", "sol1": "s1", "sol2": "s2", "label": 1}, "G", "s2"),
    "arc_easy": (
        {
            "question": "Q?",
            "choices": {"text": FOUR, "label": ["1", "2", "3", "4"]},
            "answerKey": "3",
        },
        "Question: Q?\nAnswer:",
        "three",
    ),
    "arc_challenge": (
        {"question": "Q?", "choices": {"text": FOUR, "label": list("ABCD")}, "answerKey": "B"},
        "Question: Q?\nAnswer:",
        "two.",
    ),
    "safety_mixed": ({"instruction": "I", "input": "x", "output": "o"}, "I\nx", "o"),
    "multiple_choice": ({"context": "C", "choices": FOUR, "gold": 2}, "C", "three"),
    "arithmetic": ({"prompt": "p", "response": "r"}, "p", "r"),
}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_every_preset_reads_a_row_of_its_task(preset: Path, tmp_path: Path) -> None:
    row, prompt, response = ROWS[preset.stem.removesuffix("_4b")]
    data = tmp_path / "row.jsonl"
    data.write_text(json.dumps({**row, "unused": 1}))
    overrides = [f"run_dir={tmp_path}/run", "model=m", f"task.source=['{data}']"]
    config = load_finetune_config(preset, overrides)
    assert [(e.prompt, e.response) for e in examples_of(config)] == [(prompt, response)]
    written = yaml.safe_load(preset.read_text())
    while "origin" not in written.get("task", {}) and "base" in written:
        written = yaml.safe_load((preset.parent / written["base"]).read_text())
    if preset.stem != "multiple_choice":
        assert config.task.origin and config.task.licence
    if preset.stem != "arithmetic":
        assert config.optim.lr == (7.5e-6 if preset.stem.endswith("_4b") else 1e-5)
        assert (config.train.epochs, config.train.batch_samples, config.cutoff_tokens) == (
            3,
            64,
            2048,
        )


@pytest.mark.parametrize(
    ("preset", "row"),
    [
        ("simplescaling", {"question": "q", "attempt": "boxed 2"}),
        (
            "mmlu_pro_cot",
            {"question": "q", "options": [], "cot_content": "the answer is A.", "answer": "B"},
        ),
        ("mmlu_pro_cot", {"question": "q", "options": [], "cot_content": "so (B)", "answer": "B"}),
    ],
)
def test_filters_leave_out_what_the_authors_left_out(
    preset: str, row: dict, tmp_path: Path
) -> None:
    data = tmp_path / "row.jsonl"
    data.write_text(json.dumps(row))
    path = ROOT / "configs" / "finetune" / f"{preset}.yaml"
    config = load_finetune_config(path, ["run_dir=r", "model=m", f"task.source=['{data}']"])
    assert examples_of(config) == []


def test_other_counts_than_expected_are_reported(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    config = config_of(
        tmp_path, [{"prompt": "a", "response": "b"}], "task.expect_rows=1", "task.expect_samples=5"
    )
    _, _, warnings = prepare_samples(config, tokenizer)
    assert warnings == ["task t: 1 samples, where 5 are expected: another version of the data?"]


# Configs


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=0", r"optim\.lr is 0"),
        ("optim.learning_rate=1", "learning_rate"),
        ("template=Human", r"template must contain \{content\} exactly once"),
        ("over_long=trim", "over_long"),
        ("train.batch_samples=0", r"train\.batch_samples is 0"),
        ("task.source=[]", r"task\.source is empty"),
        ("optim.warmup_fraction=1", r"optim\.warmup_fraction is 1"),
    ],
)
def test_wrong_configs(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        config_of(tmp_path, [], override)


def test_batch_must_be_divisible(tmp_path: Path) -> None:
    config = config_of(tmp_path, [], "train.batch_samples=12", "train.micro_batch_samples=4")
    assert accumulation_steps(config, 3) == 1
    with pytest.raises(
        UserError, match=r"12 is no multiple of train\.micro_batch_samples 4 x 2 processes"
    ):
        accumulation_steps(config, 2)
