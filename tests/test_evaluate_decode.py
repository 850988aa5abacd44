"""Sampling in shared batches against transformers' own generate, one prompt at a time."""

import pytest
import torch
from tokenizers_for_tests import huggingface_folder
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from megatron_wd.evals.decode import Decoder, Prompt, Settings, draw, uniform

TEXTS = [
    "The quick",
    "In the beginning was the word, and the word",
    "a",
    "def encode(self",
    "1 2 3 4 5",
]
SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": 0,
    "initializer_range": 0.4,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(huggingface_folder(tmp_path_factory.mktemp("tok") / "t"))


def make(family):
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "vocab_size": 512}
        config = GPT2Config(**sizes, eos_token_id=0, bos_token_id=0, initializer_range=0.4)
        return GPT2LMHeadModel(config).eval()
    if family == "olmo2":
        return Olmo2ForCausalLM(Olmo2Config(**SMALL)).eval()
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


def prompts(tokenizer, num_samples=1):
    return [
        Prompt(
            key,
            tokenizer(text, truncation=False)["input_ids"],
            [100 * key + s for s in range(num_samples)],
        )
        for key, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_generate_for_every_prompt(family, penalty, tokenizer):
    model = make(family)
    settings = Settings(repetition_penalty=penalty, max_new_tokens=40, max_tokens=96)
    found = {c.key: c for c in Decoder(model, tokenizer, settings, 3).run(prompts(tokenizer))}
    assert len(found) == len(TEXTS)
    for prompt in prompts(tokenizer):
        ids = torch.tensor([prompt.tokens])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            repetition_penalty=penalty,
            pad_token_id=1,
        )[0].tolist()
        text = tokenizer.decode(expected, skip_special_tokens=True)
        known = len(tokenizer.decode(prompt.tokens, skip_special_tokens=True))
        assert found[prompt.key].text == text[known:]
        assert found[prompt.key].num_tokens == len(expected) - len(prompt.tokens)


def test_samples_depend_on_their_seed_and_not_on_the_batch(tokenizer):
    model = make("llama").double()
    settings = Settings(temperature=1.0, max_new_tokens=30)

    def texts(batch_size, order):
        run = Decoder(model, tokenizer, settings, batch_size).run(order)
        return {(c.key, c.sample): (c.text, c.finish) for c in run}

    wanted = prompts(tokenizer, num_samples=5)
    alone = texts(1, wanted)
    assert len(alone) == 25
    assert len(set(alone.values())) == 25
    assert texts(7, wanted[::-1]) == alone
    assert texts(64, wanted) == alone
    for prompt in wanted:  # a prompt alone, and a sample of it alone
        one = Prompt(prompt.key, prompt.tokens, prompt.seeds[3:4])
        assert texts(4, [one])[prompt.key, 0] == alone[prompt.key, 3]


def test_answers_end_where_they_should(tokenizer):
    model = make("llama").double()
    wanted = prompts(tokenizer, num_samples=40)
    free = list(Decoder(model, tokenizer, Settings(temperature=1.0), 32).run(wanted))
    reasons = {c.finish for c in free}
    assert reasons == {"end", "length"}
    lengths = {p.key: len(p.tokens) for p in wanted}
    assert max(c.num_tokens + lengths[c.key] for c in free) == 96
    assert all(c.num_tokens + lengths[c.key] == 96 for c in free if c.finish == "length")
    stopping = Settings(temperature=1.0, stop=("th", "q"))
    stopped = {(c.key, c.sample): c for c in Decoder(model, tokenizer, stopping, 32).run(wanted)}
    assert any(c.finish == "stop" for c in stopped.values())
    for c in free:
        cut = min((c.text.find(s) for s in stopping.stop if s in c.text), default=len(c.text))
        assert stopped[c.key, c.sample].text == c.text[:cut]


def test_a_prompt_that_fills_the_model_gets_an_empty_answer(tokenizer):
    long = Prompt(0, [5] * 96, [1, 2])
    fits = Prompt(1, [5] * 95, [1])
    found = list(Decoder(make("llama"), tokenizer, Settings(), 2).run([long, fits]))
    assert [(c.key, c.finish) for c in found] == [
        (0, "prompt_too_long"),
        (0, "prompt_too_long"),
        (1, "length"),
    ] or [(c.key, c.num_tokens) for c in found][2] == (1, 1)


def test_draws_follow_the_distribution():
    seeds = list(range(40_000))
    numbers = uniform(seeds, [3] * len(seeds))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert len(set(numbers)) == len(seeds)
    chances = torch.tensor([0.5, 0.0, 0.3, 0.2])
    chosen = draw(chances.log().expand(len(seeds), 4), numbers)
    shares = torch.bincount(chosen, minlength=4) / len(seeds)
    assert shares[1] == 0
    assert torch.allclose(shares, chances, atol=0.01)
    # The published first outputs of SplitMix64 for seed 1234567.
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [(value >> 11) * 2.0**-53 for value in first]
    assert uniform([1234567] * 3, [0, 1, 2]).tolist() == expected
