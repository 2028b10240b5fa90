"""The engine on a small decoder: what a request gets is what it would get alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.data.tokenizer import train_tokenizer
from headway.errors import ModelError, RequestError
from headway.hardware import known_chip
from headway.inference import (
    LLM,
    EngineOptions,
    LoadedModel,
    SamplingParams,
    TextEngine,
    decode_graphs,
    load,
    text_engine,
)
from headway.inference.kv_cache import bytes_per_token
from headway.kernels import even_attention, exact_products, online_softmax, paged_batch, sequential_linear
from headway.models import Decoder, empty_decoder, init_weights
from headway.plan import serving, serving_latency
from headway.plan.architecture import Architecture, cache_widths
from headway.recipe import Model

MODEL = Model(vocab_size=320, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, init_std=0.3)
TEXT = "def headway(steps):\n    return steps + 1  # Zeit läuft 時間 🎉\n"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = empty_decoder(MODEL)
    init_weights(model, seed=0)
    return model.eval()


def make(decoder: torch.nn.Module, *, end_ids: tuple[int, ...] = (), max_length: int = 200, **options: Any) -> LLM:
    tokenizer = train_tokenizer([TEXT] * 3, vocab_size=300)
    loaded = LoadedModel("tiny", decoder, torch.device("cpu"), 300, max_length, tokenizer, end_ids)
    return LLM(loaded, options=EngineOptions(cache_tokens=400, **options))


def alone(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, without engine and cache."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(decoder(torch.tensor([ids]))[0, -1, :300].argmax()))
    return ids[len(prompt) :]


def test_sampled_tokens_do_not_depend_on_the_batch(decoder: Decoder) -> None:
    prompts = [[5, 17], [9] * 30, [1], [5, 17, 8, 200]] * 2
    params = [SamplingParams(max_tokens=20, seed=i, top_p=0.9, top_k=i * 10) for i in range(8)]
    together = make(decoder, block_size=4, max_sequences=5, max_batch_tokens=16).generate(prompts, params)
    for prompt, one, result in zip(prompts, params, together, strict=True):
        assert result.outputs == make(decoder, shares_prefixes=False).generate([prompt], one)[0].outputs


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_overlapping_passes_give_the_same(decoder: Decoder, penalty: float) -> None:
    """The next pass is scheduled before the last one's tokens are known: some end, some are preempted."""
    prompts = [[5, 17], [9] * 30, [1], [5, 17, 8, 200]] * 2
    params = [
        SamplingParams(
            max_tokens=80, seed=i, top_p=0.9, logprobs=2, min_tokens=i, ignore_eos=i % 4 != 0,
            repetition_penalty=penalty if i % 2 else 1.0,
        )
        for i in range(8)
    ]  # fmt: skip
    options = {"block_size": 4, "max_sequences": 6, "max_batch_tokens": 16, "end_ids": tuple(range(40, 60))}
    plain, overlapping = (make(decoder, overlaps=overlaps, **options) for overlaps in (False, True))
    expected = plain.generate(prompts, params)
    for ours, theirs in zip(overlapping.generate(prompts, params), expected, strict=True):
        output, wanted = ours.outputs[0], theirs.outputs[0]
        assert (output.token_ids, output.text) == (wanted.token_ids, wanted.text)
        assert output.finish_reason == wanted.finish_reason
        assert [row.logprob for row in output.logprobs] == pytest.approx([row.logprob for row in wanted.logprobs])
    assert {result.outputs[0].finish_reason for result in expected} == {"stop", "length"}
    assert all(llm.engine.engine.counts.preemptions for llm in (plain, overlapping))
    assert overlapping.engine.engine.counts.output_tokens == plain.engine.engine.counts.output_tokens


def test_n_outputs_have_seeds_of_their_own_and_share_the_prompt(decoder: Decoder) -> None:
    llm = make(decoder, block_size=4, max_sequences=1)
    (result,) = llm.generate([[7] * 21], SamplingParams(max_tokens=10, n=3, seed=40))
    separate = [llm.generate([[7] * 21], SamplingParams(max_tokens=10, seed=40 + i))[0] for i in range(3)]
    assert [output.token_ids for output in result.outputs] == [one.outputs[0].token_ids for one in separate]
    assert llm.engine.engine.counts.shared_tokens >= 2 * 20


def test_prompt_logprobs_are_those_of_the_whole_sequence(decoder: Decoder) -> None:
    prompt = [5, 17, 300 - 1, 2, 8, 8, 1, 40, 41, 42, 43]
    llm = make(decoder, block_size=2, max_batch_tokens=5, max_sequences=2)
    llm.generate([prompt], SamplingParams(max_tokens=1))  # a prefix in the cache changes nothing
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=0, temperature=0))
    ids = prompt + result.outputs[0].token_ids
    with torch.no_grad():
        truth = decoder(torch.tensor([ids]))[0, :, :300].double().log_softmax(-1)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for place, noted in enumerate(result.prompt_logprobs[1:]):
        assert noted is not None
        assert noted.logprob == pytest.approx(float(truth[place, ids[place + 1]]), abs=1e-4)
        assert list(noted.top) == truth[place].topk(2).indices.tolist()
    for place, noted in enumerate(result.outputs[0].logprobs, start=len(prompt) - 1):
        assert noted.logprob == pytest.approx(float(truth[place, ids[place + 1]]), abs=1e-4)


def test_ends_at_an_end_of_text_a_stop_token_and_a_stop_text(decoder: Decoder) -> None:
    free = alone(decoder, [9], 40)
    end = free[10]
    first = free.index(end)
    llm = make(decoder, end_ids=(end,))
    greedy = SamplingParams(max_tokens=40, temperature=0)
    (result,) = llm.generate([[9]], greedy)
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == (free[: first + 1], "stop")
    assert result.text == llm.engine.decode([9, *free[:first]])[len(llm.engine.decode([9])) :]
    (result,) = llm.generate([[9]], greedy.model_copy(update={"ignore_eos": True}))
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == (free, "length")
    (result,) = make(decoder).generate([[9]], greedy.model_copy(update={"stop_token_ids": (end,)}))
    assert result.outputs[0].token_ids == free[: first + 1]
    whole = make(decoder).generate([[9]], greedy)[0].text
    middle = whole[len(whole) // 2 :][:3]
    (result,) = make(decoder).generate([[9]], greedy.model_copy(update={"stop": (middle,)}))
    assert result.text == whole[: whole.index(middle)]
    assert result.outputs[0].finish_reason == "stop"


def test_a_request_ends_at_the_model_s_length(decoder: Decoder) -> None:
    (result,) = make(decoder, max_length=12).generate([[9] * 5], SamplingParams(temperature=0))
    assert len(result.outputs[0].token_ids) == 7
    assert result.outputs[0].finish_reason == "length"


def test_a_cache_too_small_for_all_changes_no_token(decoder: Decoder) -> None:
    llm = make(decoder, block_size=4)
    llm.engine.engine.pool = type(llm.engine.engine.pool)(16, 4)
    prompts = [[i + 1] * 9 for i in range(6)]
    results = llm.generate(prompts, SamplingParams(max_tokens=30, temperature=0))
    assert llm.engine.engine.counts.preemptions > 0
    assert [result.outputs[0].token_ids for result in results] == [alone(decoder, prompt, 30) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([5, 300], {}, "token id 300 is not in the vocabulary of 300"),
        ([-1], {}, "token id -1 is not in"),
        ([1] * 200, {}, "the prompt has 200 tokens, but the model takes 200 in all"),
        ([1], {"logit_bias": {999: 1.0}}, "999 is not in the vocabulary"),
    ],
)
def test_impossible_requests_are_refused(decoder: Decoder, prompt: list[int], params: dict, message: str) -> None:
    llm = make(decoder)
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], SamplingParams(**params))
    assert len(llm.generate([[3]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2, "it still serves"


def test_a_length_beyond_the_model_s_is_refused(decoder: Decoder) -> None:
    loaded = LoadedModel("m", decoder, torch.device("cpu"), 320, 128)
    assert TextEngine(loaded, EngineOptions(cache_tokens=400, max_length=64)).engine.context == 64
    with pytest.raises(ModelError, match="m takes sequences of 128 tokens, not of 100,000"):
        TextEngine(loaded, EngineOptions(cache_tokens=400, max_length=100_000))


def test_a_request_larger_than_the_cache_is_refused_with_the_numbers(decoder: Decoder) -> None:
    llm = make(decoder, max_length=5000)
    with pytest.raises(RequestError, match="300 tokens and max_tokens is 300, but the KV cache has room for 400"):
        llm.generate([[1] * 300], SamplingParams(max_tokens=300))


class Own(torch.nn.Module):
    """A model of the user's own: an average of embeddings, with or without a cache."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(320, 16), torch.nn.Linear(16, 320)
        if cached:
            self.forward = self.with_cache  # type: ignore[method-assign]
            self.cache_shape = lambda: (1, 2, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).unflatten(-1, (2, 8)).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(y.transpose(1, 2).flatten(2))

    def with_cache(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        x = self.embed(tokens).unflatten(-1, (2, 8))
        return self.head(cache.layer(0).attend(x, x, x).flatten(2))


def test_a_class_of_one_s_own_works_with_and_without_a_cache() -> None:
    torch.manual_seed(0)
    plain, cached = Own(cached=False), Own(cached=True)
    cached.load_state_dict(plain.state_dict())
    prompts = [[5, 17], [9] * 30, [1]]
    params = SamplingParams(max_tokens=12, temperature=0)
    outputs = [[result.outputs[0].token_ids for result in make(m).generate(prompts, params)] for m in (plain, cached)]
    assert outputs[0] == outputs[1]
    ids = list(prompts[0])
    for token in outputs[0][0]:
        with torch.no_grad():
            assert token == int(plain(torch.tensor([ids]))[0, -1, :300].argmax())
        ids.append(token)


def test_memory_of_the_cache_is_counted(decoder: Decoder, tmp_path: Path) -> None:
    llm = make(decoder)
    engine = llm.engine.engine
    pages = engine.runner.pages  # type: ignore[attr-defined]
    assert engine.pool.count == 400 // 16
    assert math.prod(pages.keys[0].shape) == (400 + 16) * 2 * 8  # and a scratch page


def test_a_plan_makes_the_cache_as_large_as_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`headway plan --serve` repeats the engine's defaults, since it must not import torch."""
    arch = Architecture(16, 2048, 32, 8, 64, 8192, 128256)
    memory = serving.serving_memory(arch, known_chip("h200"), serving.ServingLoad(1000, 300), "bfloat16")
    free = int(memory.capacity - memory.weights - memory.context)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, int(memory.capacity)))
    pages = text_engine._pages(EngineOptions(), memory.token_bytes, torch.device("cuda"))
    assert pages * EngineOptions().tokens_per_block(torch.device("cuda")) == memory.cache_tokens
    assert memory.token_bytes == bytes_per_token(arch.layers, cache_widths(arch), torch.bfloat16)
    assert serving.CPU_SHARE == text_engine.CPU_SHARE
    assert EngineOptions().max_batch_tokens == serving.PASS_TOKENS
    assert EngineOptions().max_sequences == serving.SEQUENCES
    assert serving_latency.MOST_STEPS == decode_graphs.MOST_STEPS
    assert serving_latency.FUSED_ROWS == sequential_linear.MOST_ROWS
    assert serving_latency.EVEN_SEQUENCES == even_attention.LEAST_SEQUENCES
    assert serving_latency.SPAN_KEYS == online_softmax.EXACT_SPAN
    assert serving_latency.FRESH_TOKENS == paged_batch.FRESH_TOKENS
    assert serving_latency.LIBRARY_ROWS == exact_products.WHOLE


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_stored_precision_is_read_by_both_of_its_names(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen(Exception):
        pass

    def choose(name: str, stored: str | None, device: torch.device) -> None:
        raise Chosen(name, stored, device.type)

    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, key: "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(load, "_dtype", choose)
    with pytest.raises(Chosen) as caught:
        load.load_folder(tmp_path, device="cpu")
    assert caught.value.args == ("auto", "bfloat16", "cpu")
