"""Exact mode: the engine's log-probabilities have the bits of the trainer's forward pass, however either batches."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.errors import ModelError
from headway.inference import LLM, EngineOptions, LoadedModel, SamplingParams
from headway.inference.load import live_model
from headway.kernels import batch_invariant_attention as tiled
from headway.models import Decoder, empty_decoder, init_weights
from headway.models.exact import make_exact
from headway.models.lora import add_adapters, is_adapter
from headway.recipe import Lora
from headway.recipe.families import class_of

BASE = {"vocab_size": 331, "layers": 2, "dim": 48, "heads": 6, "kv_heads": 2, "hidden": 80, "init_std": 0.2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True, "heads": 4},
    "mixtral": {"family": "mixtral", "experts": 5, "top_k": 2},
    "llama": {"tie_embeddings": False, "qkv_bias": True, "heads": 3, "kv_heads": 1},
    "mistral": {"family": "mistral", "window": 20},
    "smollm3": {"family": "smollm3"},
    "olmo2": {"family": "olmo2"},
    "qwen3_moe": {"family": "qwen3_moe", "experts": 8, "top_k": 3},
}
VOCABULARY = 300
"""Of the tokenizer, smaller than the model's."""
TEMPERATURE = 0.8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Answer:
    """What the engine sampled after a prompt."""

    tokens: list[int]
    logprobs: Tensor
    """Of the last tokens."""


def decoder_of(name: str, **changes: Any) -> Decoder:
    values = {**BASE, **FAMILIES[name], **changes}
    decoder = empty_decoder(class_of(values)(**values))
    init_weights(decoder, seed=0)
    return decoder.eval()


def requests(count: int, longest: int, rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some with equal beginnings, and parameters."""
    shared = [rng.randrange(VOCABULARY) for _ in range(90)]
    begins = [shared[: rng.randrange(1, 90)] if rng.random() < 0.5 else [] for _ in range(count)]
    prompts = [begin + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))] for begin in begins]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(longest // 4, longest), temperature=TEMPERATURE, seed=i,
            top_p=rng.choice([1, 0.9]), logprobs=rng.choice([0, 2]), logprobs_at_temperature=True,
        )
        for i in range(count)
    ]  # fmt: skip
    return prompts, params


def engine(decoder: Decoder, vocabulary: int = VOCABULARY, **options: Any) -> LLM:
    loaded = LoadedModel("tiny", decoder, CPU, vocabulary, 400)
    return LLM(loaded, options=EngineOptions(**{"exact": True, "cache_tokens": 420, **options}))


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
    results = llm.generate(prompts, params)
    return [
        Answer(result.prompt_ids + output.token_ids, torch.tensor([token.logprob for token in output.logprobs]))
        for result in results
        for output in result.outputs
    ]


def trained(decoder: Decoder, sampled: list[Answer], length: int, rows: int, rng: random.Random) -> list[Tensor]:
    """The trainer's log-probabilities of what was sampled, with documents packed into rows in random order."""
    packed = list[list[int]]()
    for number in rng.sample(range(len(sampled)), len(sampled)):
        needed = len(sampled[number].tokens) - 1
        if not packed or sum(len(sampled[i].tokens) - 1 for i in packed[-1]) + needed > length:
            packed.append([])
        packed[-1].append(number)
    tokens, labels = torch.zeros(len(packed), length, dtype=torch.int64), torch.full((len(packed), length), -100)
    documents = torch.zeros(len(packed), length, dtype=torch.int32)
    places = {}
    for row, numbers in enumerate(packed):
        begin = 0
        for document, number in enumerate(numbers):
            ids = torch.tensor(sampled[number].tokens)
            here = slice(begin, begin + len(ids) - 1)
            tokens[row, here], labels[row, here], documents[row, here] = ids[:-1], ids[1:], document
            begin, places[number] = begin + len(ids) - 1, (row, begin + len(ids) - 1)
        documents[row, begin:] = len(numbers)  # padding
    passes = range(0, len(packed), rows)
    logprobs = torch.cat(
        [
            decoder.logprobs(
                tokens[i : i + rows], labels[i : i + rows], documents[i : i + rows], temperature=TEMPERATURE
            )
            for i in passes
        ]
    )
    ends = [places[number] for number in range(len(sampled))]
    counts = [len(answer.logprobs) for answer in sampled]
    return [logprobs[row, end - count : end] for (row, end), count in zip(ends, counts, strict=True)]


def assert_equal(sampled: list[Answer], of_trainer: list[Tensor]) -> None:
    for answer, logprobs in zip(sampled, of_trainer, strict=True):
        assert torch.equal(answer.logprobs, logprobs)


ENGINES = [
    {"block_size": 4, "max_sequences": 6, "max_batch_tokens": 16, "cache_tokens": 240},
    {"block_size": 16, "max_sequences": 14, "max_batch_tokens": 512},
    {"block_size": 7, "max_sequences": 3, "max_batch_tokens": 33, "shares_prefixes": False},
    {"block_size": 64, "cache_tokens": 6400, "overlaps": True},
]
"""Decoding with chunks of prompts, preemptions, prefix-cache hits, and neither."""


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_the_engine_reports_the_trainers_bits(family: str) -> None:
    rng = random.Random(1)
    decoder = decoder_of(family)
    llm = engine(decoder, **ENGINES[0])
    sampled = answers(llm, *requests(8, 60, rng))
    counts = llm.engine.engine.counts
    assert counts.preemptions
    assert counts.shared_tokens
    assert_equal(sampled, trained(decoder, sampled, length=400, rows=2, rng=rng))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_thousands_of_tokens_have_the_trainers_bits_in_every_batch(family: str) -> None:
    decoder, total = decoder_of(family), 0
    for seed in range(2):
        rng = random.Random(seed)
        asked, before = requests(24, 120, rng), list[Answer]()
        for options in ENGINES:
            sampled = answers(engine(decoder, **options), *asked)
            for answer, other in zip(sampled, before, strict=False):
                assert answer.tokens == other.tokens
                assert torch.equal(answer.logprobs, other.logprobs)
            before = sampled
        for length, rows in ((256, 1), (700, 2), (2000, 5)):
            assert_equal(before, trained(decoder, before, length, rows, rng))
        total += sum(len(answer.logprobs) for answer in before)
    assert total > 2000


def test_a_trainer_with_more_threads_has_the_same_bits() -> None:
    rng, before = random.Random(5), torch.get_num_threads()
    decoder = decoder_of("llama")
    sampled = answers(engine(decoder, **ENGINES[1]), *requests(3, 30, rng))
    try:
        torch.set_num_threads(before + 1)
        assert_equal(sampled, trained(decoder, sampled, length=200, rows=1, rng=rng))
    finally:
        torch.set_num_threads(before)


def test_tiles_of_another_size_do_not_have_the_trainers_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice."""
    rng = random.Random(1)
    decoder = decoder_of("qwen3")
    with monkeypatch.context() as patch:
        patch.setattr(tiled, "KEYS", 32)
        sampled = answers(engine(decoder, **ENGINES[1]), *requests(6, 60, rng))
    of_trainer = trained(decoder, sampled, length=400, rows=2, rng=rng)
    torch.testing.assert_close([answer.logprobs for answer in sampled], of_trainer)
    assert not all(torch.equal(answer.logprobs, other) for answer, other in zip(sampled, of_trainer, strict=True))


def test_without_exact_mode_the_bits_differ() -> None:
    rng = random.Random(1)
    decoder = decoder_of("qwen3")
    llm = engine(decoder, vocabulary=331, exact=False, **ENGINES[0])
    sampled = answers(llm, *requests(6, 60, rng))
    of_trainer = trained(decoder, sampled, length=400, rows=2, rng=rng)
    torch.testing.assert_close([answer.logprobs for answer in sampled], of_trainer, rtol=1e-4, atol=1e-3)
    assert not all(torch.equal(answer.logprobs, other) for answer, other in zip(sampled, of_trainer, strict=True))


def test_a_model_with_adapters_has_the_trainers_bits() -> None:
    rng = random.Random(4)
    decoder = decoder_of("llama")
    add_adapters(decoder, Lora(rank=4))
    for name, parameter in decoder.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    sampled = answers(engine(decoder, **ENGINES[1]), *requests(4, 30, rng))
    assert_equal(sampled, trained(decoder, sampled, length=200, rows=1, rng=rng))


def test_prompts_have_the_trainers_bits_too() -> None:
    decoder = decoder_of("llama")
    llm = engine(decoder, **ENGINES[0])
    ids = [random.Random(2).randrange(VOCABULARY) for _ in range(150)]
    result = llm.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert result.prompt_logprobs is not None
    reported = torch.tensor([row.logprob for row in result.prompt_logprobs if row is not None])
    tokens = torch.tensor([ids])
    with torch.no_grad():
        assert torch.equal(reported, decoder.logprobs(tokens[:, :-1], tokens[:, 1:])[0])


def test_new_weights_of_a_trainer_that_shares_its_model_are_followed() -> None:
    rng = random.Random(3)
    decoder = decoder_of("llama")
    llm = LLM(live_model(decoder), options=EngineOptions(exact=True, cache_tokens=2000))
    for version in range(2):
        sampled = answers(llm, *requests(4, 40, rng))
        assert_equal(sampled, trained(decoder, sampled, length=300, rows=3, rng=rng))
        with torch.no_grad():
            llm.update_weights(lambda: [p.mul_(1.01) for p in decoder.parameters()], version + 1)


# -- the trainer's side


def test_gradients_are_those_of_the_plain_model() -> None:
    for family in ("qwen3", "mixtral"):
        plain, exact = decoder_of(family, init_std=0.1), decoder_of(family, init_std=0.1)
        make_exact(exact, CPU)
        rng = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 331, (2, 100), generator=rng)
        documents = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor([37, 63])).expand(2, -1)
        labels = torch.randint(0, 331, (2, 100), generator=rng)
        labels[:, ::7] = -100
        for decoder in (plain, exact):
            decoder.logprobs(tokens, labels, documents, temperature=0.7).sum().backward()
        for (name, parameter), other in zip(plain.named_parameters(), exact.parameters(), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            # Positions that begin anew turn by other angles, whose differences round otherwise.
            torch.testing.assert_close(
                other.grad, parameter.grad, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"family": "gemma2", "vocab_size": 40, "layers": 1, "dim": 32, "heads": 2, "hidden": 32},
            "support gemma2 yet",
        ),
        ({"family": "gpt2", "vocab_size": 40, "layers": 1, "dim": 32, "heads": 2}, "support gpt2 yet"),
    ],
)
def test_other_families_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    decoder = empty_decoder(class_of(values)(**values))
    with pytest.raises(ModelError, match=message):
        make_exact(decoder, CPU)


def test_other_precisions_and_devices_are_refused() -> None:
    decoder = decoder_of("llama")
    with pytest.raises(ModelError, match=r"no kernels for bfloat16 on cpu yet, which embed\.weight is in"):
        make_exact(decoder_of("llama").to(torch.bfloat16), CPU)
    with pytest.raises(ModelError, match="no kernels for float32 on cuda yet"):
        make_exact(decoder, torch.device("cuda"))
    assert not decoder.loss.exact
