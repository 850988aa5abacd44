"""A config is read strictly: what it says is what runs, and every mistake is named."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_wd.config import (
    Config,
    ModelConfig,
    UserError,
    diff_from_defaults,
    load_config,
    load_structured,
    num_parameters,
    resolved_yaml,
    validate_world,
)
from megatron_wd.config.source import parse_scalar, parse_yaml

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "tiny.yaml"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PARTS = {"base", "models", "studies", "finetune", "evaluate"}  # no pretraining runs by themselves
COMPLETE = [p for p in CONFIGS if not PARTS & set(p.relative_to(ROOT).parts)]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes text as a config file and returns its path."""

    def write_file(text: str, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    return write_file


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)


def based(text: str) -> str:
    """A config over the tiny one, so that only `text` can be wrong."""
    return f"base: {TINY}\n{text}"


# Shipped files


@pytest.mark.parametrize("path", COMPLETE, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_shipped_config_loads_and_fits_its_own_layout(path: Path) -> None:
    config = load_config(path)
    samples = config.train.global_batch_samples // config.train.micro_batch_samples
    interleaved = config.parallel.virtual_pipeline > 1  # needs as many micro-batches as stages
    most = samples // config.parallel.pipeline if interleaved else samples
    validate_world(config, config.parallel.model_ranks)
    validate_world(config, config.parallel.model_ranks * most)


def test_every_shipped_base_is_used() -> None:
    bases = {p for p in CONFIGS if "base" in p.relative_to(ROOT).parts}
    named = set()
    for path in CONFIGS:
        value = yaml.safe_load(path.read_text("utf-8")).get("base", [])
        for name in value if isinstance(value, list) else [value]:
            named.add((path.parent / name).resolve())
    assert bases and bases <= named


# Derived quantities


def test_parameter_counts() -> None:
    model = ModelConfig(
        num_layers=1, hidden_size=4, ffn_hidden_size=3, num_attention_heads=2, vocab_size=10
    )
    # Attention 4 matrices of 4x4, MLP 3 of 4x3, three norms of 4, two tables of 10x4.
    assert num_parameters(model) == 64 + 36 + 12 + 80
    assert num_parameters(model, include_embeddings=False) == 64 + 36 + 12
    tied = dataclasses.replace(model, tie_embeddings=True)
    assert num_parameters(tied) == 64 + 36 + 12 + 40
    grouped = dataclasses.replace(model, num_query_groups=1)
    assert num_parameters(grouped) == num_parameters(model) - 2 * 4 * 2
    wide = dataclasses.replace(model, head_dim=4)
    assert num_parameters(wide) == num_parameters(model) + 64


def test_defaults_that_follow_from_other_fields() -> None:
    config = load_config(TINY, ["model.num_query_groups=null", "optim.min_lr=null"])
    assert (config.model.kv_heads, config.model.head_size) == (4, 16)
    assert config.model.padded_vocab_size == 256
    assert dataclasses.replace(config.model, vocab_size=256).padded_vocab_size == 256
    assert dataclasses.replace(config.model, vocab_size=257).padded_vocab_size == 384
    assert config.optim.final_lr == pytest.approx(3e-4)
    assert load_config(TINY, ["model.head_dim=32"]).model.head_size == 32
    layout = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.context=4"]
    assert load_config(TINY, layout).parallel.model_ranks == 16


@pytest.mark.parametrize(("tokens", "steps"), [(512, 1), (513, 2), (5120, 10)])
def test_tokens_are_rounded_up_to_whole_steps(tokens: int, steps: int) -> None:
    config = load_config(
        TINY, ["train.steps=null", f"train.tokens={tokens}", "optim.warmup_steps=null"]
    )
    assert config.train.step_tokens == 512
    assert (config.steps, config.total_tokens) == (steps, steps * 512)


@pytest.mark.parametrize(
    ("overrides", "warmup", "decay"),
    [
        (["optim.warmup_steps=null"], 0, 0),
        (["optim.warmup_steps=7"], 7, 0),
        # In floats 0.1 * 30 is more than 3.
        (["optim.warmup_steps=null", "optim.warmup_fraction=0.1"], 3, 0),
        (["optim.warmup_steps=null", "optim.warmup_fraction=0.11"], 4, 0),
        (["optim.schedule=wsd", "optim.wsd_decay_fraction=0.2"], 2, 6),
    ],
)
def test_lengths_of_the_schedule(overrides: list[str], warmup: int, decay: int) -> None:
    config = load_config(TINY, ["train.steps=30", *overrides])
    assert (config.warmup_steps, config.wsd_decay_steps) == (warmup, decay)


# Scalars and syntax


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("3", 3), ("-3", -3), ("20_000", 20000), ("0", 0)],
        *[("1e-3", 1e-3), ("1E5", 1e5), ("1.5", 1.5), (".5", 0.5), ("2.", 2.0), ("1_0.5", 10.5)],
        *[("true", True), ("False", False), ("null", None), ("~", None)],
        # YAML 1.1 has other ideas about these.
        *[("yes", "yes"), ("on", "on"), ("010", "010"), ("1:30", "1:30"), ("0x10", "0x10")],
        *[("2020-01-01", "2020-01-01"), ("1e", "1e"), ("-", "-"), ("fp8", "fp8")],
    ],
)
def test_plain_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)
    if text != "-":
        assert parse_yaml(f"key: {text}", "file")[0] == {"key": value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2", ":2: seed is set twice (first on line 1)"),
        ("optim:\n  lr: 1\n  lr: 1", ":3: optim.lr is set twice"),
        ("optim: {lr: 1", "not valid YAML"),
        ("a: b: c", ":1: not valid YAML"),
        ("\tseed: 1", ":1: not valid YAML"),
        ("seed: !!int '3'\nlog: !!python/name:os.system ''", "tag"),
        ("- 1", "expected keys and values"),
        ("", "the file is empty"),
        ("# nothing", "the file is empty"),
        ("? [a]\n: 1", "a key must be plain text"),
        ("model: &m\n  x: *m", "contains itself"),
    ],
)
def test_bad_syntax_is_named_with_its_line(write: Write, text: str, expected: str) -> None:
    message = message_of(write(text))
    assert "config.yaml" in message and expected in message


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such config file" in message_of(tmp_path / "none.yaml")
    assert "is a folder" in message_of(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in message_of(tmp_path / "binary.yaml")


# Keys and types


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim:\n  lrr: 1", ":3: optim.lrr: unknown key; did you mean optim.lr?"),
        ("optimizer: {}", ":2: optimizer: unknown key"),
        ("lr: 1e-3", "did you mean optim.lr?"),
        ("every_steps: 1", "log.every_steps"),
        ("train: {seqence_tokens: 64}", "did you mean train.sequence_tokens?"),
        (
            "data: {train: [{pth: a}]}",
            "data.train.0.pth: unknown key; did you mean data.train.0.path",
        ),
        ("model: {zzz: 1}", "the keys here are: family, num_layers"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(write: Write, text: str, expected: str) -> None:
    assert expected in message_of(write(based(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('seed: "3"', ":2: seed: expected an integer, got the text '3'; write it without quotes"),
        ("seed: 1.0", "write 1"),
        (
            "train: {tokens: 1e9}",
            "train.tokens: expected an integer, got 1000000000.0; write 1_000_000_000 or null",
        ),
        ("seed: true", "expected an integer, got true"),
        ("seed: null", "expected an integer, got null"),
        ("parallel: {sequence: yes}", "expected true or false, got the text 'yes'"),
        ("parallel: {sequence: 1}", "expected true or false, got 1"),
        ('optim: {lr: "1e-3"}', "optim.lr: expected a number, got the text '1e-3'"),
        ("optim: {lr: true}", "expected a number, got true"),
        ("optim: {lr: .nan}", "finite"),
        ("optim: {lr: [1]}", "expected a number, got a list"),
        ("run_dir: 3", 'write "3" in quotes'),
        ("precision: fp16", "choose one of: fp32, bf16, fp8"),
        ("optim: {schedule: cosin}", "did you mean cosine?"),
        ("model: 3", "expected a section with keys (family, num_layers"),
        ("model:", "got null"),
        ("data: {train: data/x}", "data.train: expected a list"),
        ("data: {train: [data/x]}", "data.train.0: expected a section with keys (path, weight)"),
    ],
)
def test_a_wrong_type_is_not_converted(write: Write, text: str, expected: str) -> None:
    assert expected in message_of(write(based(text)))
    key, _, value = text.partition(": ")
    if value:
        assert expected.removeprefix(":2: ") in message_of(TINY, f"{key}={value}")


def test_an_integer_is_a_number_and_1e_minus_3_too(write: Write) -> None:
    config = load_config(write(based("optim: {lr: 1e-3, weight_decay: 1}")), ["optim.eps=1e-7"])
    assert (config.optim.lr, config.optim.weight_decay, config.optim.eps) == (1e-3, 1.0, 1e-7)
    assert type(config.optim.weight_decay) is float


def test_all_mistakes_of_a_file_are_named_at_once(write: Write) -> None:
    message = message_of(write(based("sed: 1\nlog: {every: 1}\nprecision: fp16")))
    assert len(message.splitlines()) == 3


def test_missing_values_are_named_at_once(write: Write) -> None:
    message = message_of(
        write("run_dir: x\ndata: {train: [{weight: 1.0}]}\nmodel: {hidden_size: '???'}")
    )
    for name in ("model.num_layers", "model.hidden_size", "data.tokenizer", "data.train.0.path"):
        assert name in message
    assert "run_dir" not in message
    assert "optim.lr" not in message_of(write("run_dir: x"), "optim.lr=1e-3")


# Base files, overrides, references


def test_files_build_on_one_another(write: Write) -> None:
    write(
        "seed: 1\noptim: {lr: 0.1, eps: 1e-7}\ndata: {valid: [{path: a}, {path: b}]}", "deep/a.yaml"
    )
    write("seed: 2\nlog: {every_steps: 3}", "deep/b.yaml")
    write("base: [a.yaml, b.yaml]\noptim: {lr: 0.2}", "deep/c.yaml")
    path = write(f"base: [{TINY}, deep/c.yaml]\ndata: {{valid: [{{path: c}}]}}")
    config = load_config(path, ["log.every_steps=4"])
    assert (config.seed, config.optim.lr, config.optim.eps) == (2, 0.2, 1e-7)
    assert [corpus.path for corpus in config.data.valid] == ["c"]  # lists are replaced
    assert config.log.every_steps == 4
    assert config.model.hidden_size == 64


def test_mistakes_in_a_base_name_the_base(write: Write) -> None:
    write("log: {every_step: 1}", "below.yaml")
    assert "below.yaml:1: log.every_step" in message_of(write("base: below.yaml\nseed: 1"))


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("none.yaml", ":1: base: there is no file"),
        ("3", "expected a path"),
        ("[]", "expected a path"),
    ],
)
def test_bad_bases(write: Write, base: str, expected: str) -> None:
    assert expected in message_of(write(f"base: {base}"))


def test_a_circle_of_bases_is_an_error(write: Write) -> None:
    write("base: config.yaml", "other.yaml")
    message = message_of(write("base: other.yaml"))
    assert "circle" in message and "other.yaml" in message
    write("base: self.yaml", "self.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("optim..lr=3", "expected key.path=value"),
        ("seed=", "no value"),
        (
            "optim.lrr=1",
            "command line: optim.lrr=1: optim.lrr: unknown key; did you mean optim.lr?",
        ),
        ("optim={lr: 1, lr: 2}", "set twice"),
        ("data.train.7.weight=1", "data.train"),
        ("base=x.yaml", "unknown key"),
        ("data.train=[{path: x}", "not valid YAML"),
    ],
)
def test_bad_overrides(override: str, expected: str) -> None:
    assert expected in message_of(TINY, override)


def test_overrides_reach_every_place() -> None:
    config = load_config(
        TINY,
        [
            "seed=1",
            "seed=2",
            "data.train=[{path: a}, {path: b}]",
            "data.train.1.weight=3",
            "optim={lr: 0.5}",
            "run_dir=a folder #1: x",
        ],
    )
    assert config.seed == 2
    assert [(c.path, c.weight) for c in config.data.train] == [("a", 1.0), ("b", 3.0)]
    assert (config.optim.lr, config.optim.warmup_steps) == (0.5, 2)
    assert config.run_dir == "a folder #1: x"


def test_references_to_other_values(write: Write) -> None:
    text = (
        "run_dir: runs/wd${optim.weight_decay}\n"
        "evaluate: {samples: '${train.global_batch_samples}'}"
    )
    config = load_config(write(based(text)), ["optim.weight_decay=0.5"])
    assert config.run_dir == "runs/wd0.5"  # weight_decay has a default: references see it
    assert config.evaluate.samples == 8
    assert "expected an integer, got the text" in message_of(write(based("seed: '${run_dir}'")))
    assert ":2: run_dir" in message_of(write(based("run_dir: '${no.such}'")))
    assert "nope" in message_of(TINY, "run_dir=${nope}")


def test_no_config_reads_the_environment(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    for text in ("${oc.env:SECRET}", "a/${oc.env:SECRET,x}", "${oc.decode:'1'}"):
        message = message_of(TINY, f"run_dir={text}")
        assert "resolver" in message and "hidden" not in message
    assert "resolver" in message_of(write(based("data: {tokenizer: '${oc.env:SECRET}'}")))


# Writing


def test_the_resolved_config_loads_back_to_the_same(write: Write) -> None:
    odd = ["run_dir='1e5'", "optim.lr=1e-9", "data.tokenizer='010'", "optim.eps=1e-12"]
    config = load_config(TINY, odd)
    assert load_config(write(resolved_yaml(config))) == config
    assert load_config(write(resolved_yaml(config, mark_changes=True))) == config


def test_what_differs_from_the_defaults_is_marked() -> None:
    config = load_config(TINY, ["optim.beta2=0.99", "parallel.sequence=true", "parallel.tensor=2"])
    changes = diff_from_defaults(config)
    assert changes["optim.beta2"] == (0.95, 0.99)
    assert changes["parallel.sequence"] == (False, True)
    assert changes["optim.lr"] == ("???", 3e-3)
    assert "optim.beta1" not in changes and "model.family" not in changes
    text = resolved_yaml(config, mark_changes=True)
    assert "  beta2: 0.99  # default: 0.95\n" in text
    assert "  sequence: true  # default: false\n" in text
    assert "  beta1: 0.9\n" in text
    assert "  num_layers: 4  # required\n" in text


def test_other_dataclasses_are_read_as_strictly(write: Write) -> None:
    @dataclasses.dataclass
    class Grid:
        values: dict[str, list[float]]
        name: str = "grid"

    globals()["Grid"] = Grid
    path = write("values: {optim.lr: [1e-3, 1]}")
    assert load_structured(Grid, path).values == {"optim.lr": [1e-3, 1.0]}
    with pytest.raises(UserError, match=r"values\.optim\.lr\.0: expected a number"):
        load_structured(Grid, write("values: {optim.lr: [x]}"))


# The house


def test_every_field_is_documented_in_its_class_and_in_the_docs() -> None:
    guide = (ROOT / "docs" / "configuration.md").read_text("utf-8")

    def check(kind: Any, path: str) -> None:
        documented = yaml_like_attributes(kind.__doc__ or "")
        for field in dataclasses.fields(kind):
            assert field.name in documented, f"{kind.__name__}.{field.name}"
            value = field.default_factory() if callable(field.default_factory) else None
            if dataclasses.is_dataclass(value):
                check(type(value), f"{path}{field.name}.")
            else:
                assert f"`{path}{field.name}`" in guide, f"{path}{field.name}"

    check(Config, "")


def yaml_like_attributes(doc: str) -> set[str]:
    lines = [line.strip() for line in doc.partition("Attributes:")[2].splitlines()]
    return {line.split(":")[0] for line in lines if ":" in line}


def test_the_examples_of_the_docs_are_yaml() -> None:
    blocks = (ROOT / "docs" / "configuration.md").read_text("utf-8").split("```yaml\n")[1:]
    assert blocks
    for block in blocks:
        yaml.safe_load(block.split("```")[0])


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=1" + "0" * 400,
        "train.steps=" + "9" * 5000,
        "seed=!!int abc",
        "data.train=" + "[" * 3000,
    ],
    ids=["too large", "too long", "no int", "too deep"],
)
def test_what_yaml_itself_cannot_take_is_a_mistake_too(override: str) -> None:
    with pytest.raises(UserError):
        load_config(ROOT / "configs" / "quickstart.yaml", [override])


def test_loading_a_config_imports_no_torch() -> None:
    code = (
        "import sys; from megatron_wd.config import load_config; "
        f"load_config({str(TINY)!r}); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
