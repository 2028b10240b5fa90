"""Decoding as on a GPU, several passes per round-trip with the host, against plain passes on a CPU; in Triton's
interpreter, where a pass is run instead of a graph replayed."""

import random

import pytest
import torch

from headway.inference import LLM, EngineOptions, LoadedModel, SamplingParams, text_engine
from headway.kernels import dispatch
from headway.models import Decoder, empty_decoder, init_weights
from headway.recipe.families import class_of

MODEL = {
    "family": "llama", "vocab_size": 40, "layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "head_dim": 32,
    "hidden": 32, "qk_norm": True, "tie_embeddings": False,
}  # fmt: skip
OPTIONS = {"cache_tokens": 128, "max_batch_tokens": 12, "max_sequences": 3, "block_size": 8}


def loaded(dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = class_of("llama").model_validate(MODEL)
    decoder: Decoder = empty_decoder(model, torch.device("cpu"))
    init_weights(decoder, seed=0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # so that distributions are far from even
    return LoadedModel("small", decoder.to(dtype).eval(), torch.device("cpu"), model.vocabulary, 64, end_ids=(3,))


def requests(longer_by: int = 3) -> tuple[list[list[int]], list[SamplingParams]]:
    """More than run at a time, longer than a pass, with ends, log-probabilities and one that needs the host."""
    draw = random.Random(1)
    prompts = [[draw.randrange(40) for _ in range(draw.randint(1, 20))] for _ in range(5)]
    params = [
        SamplingParams(max_tokens=3 + longer_by * i, temperature=0.8 * (i != 1), seed=i, logprobs=0, ignore_eos=i != 2)
        for i in range(5)
    ]
    params[3] = params[3].model_copy(update={"top_k": 5})
    return prompts, params


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "devices", ("cuda", "cpu"))
    monkeypatch.setattr(text_engine, "capturable", lambda *_: True)


@pytest.mark.parametrize("overlaps", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_and_logprobs_are_those_of_plain_passes(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = requests(longer_by=2)  # short, as every launch is interpreted
    plain = LLM(loaded(), options=EngineOptions(**OPTIONS)).generate(prompts, params)
    monkeypatch.setattr(dispatch, "devices", ("cuda", "cpu"))
    monkeypatch.setattr(text_engine, "capturable", lambda *_: True)
    llm = LLM(loaded(), options=EngineOptions(**OPTIONS, overlaps=overlaps))
    engine = llm.engine.engine
    assert engine.runner.fused is not None  # type: ignore[attr-defined]
    results = llm.generate(prompts, params)
    assert engine.counts.steps < sum(len(result.outputs[0].token_ids) for result in results) / 2
    assert engine.pool.free == engine.pool.count
    for mine, theirs in zip(results, plain, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert mine.outputs[0].finish_reason == theirs.outputs[0].finish_reason
        for here, there in zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_preempted_sequences_start_over_from_known_tokens() -> None:
    """A cache for two of three sequences: the youngest starts over after several passes without the host."""
    draw = random.Random(2)
    prompts = [[draw.randrange(40) for _ in range(7)] for _ in range(3)]
    params = [SamplingParams(max_tokens=30, temperature=0.9, seed=i, ignore_eos=True) for i in range(3)]
    small = LLM(loaded(), options=EngineOptions(**OPTIONS | {"cache_tokens": 88}, overlaps=True))
    results = small.generate(prompts, params)
    assert small.engine.engine.counts.preemptions > 0
    large = LLM(loaded(), options=EngineOptions(**OPTIONS, graphs=False))
    expected = large.generate(prompts, params)
    assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in expected]


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_exact_log_probabilities_are_the_trainers() -> None:
    """With head norms, chunks and several passes at a time; kernels for tiles of other sizes do all of it."""
    prompts, params = requests()
    params = [p.model_copy(update={"logprobs_at_temperature": True, "temperature": 0.8}) for p in params]
    wide = class_of("llama").model_validate(MODEL | {"head_dim": 64, "heads": 1})
    decoder: Decoder = empty_decoder(wide, torch.device("cpu"))
    init_weights(decoder, seed=0)
    small = LoadedModel("small", decoder.eval(), torch.device("cpu"), wide.vocabulary, 64)
    llm = LLM(small, options=EngineOptions(**OPTIONS, overlaps=True, exact=True))
    for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
        tokens = prompt + result.outputs[0].token_ids
        labels = torch.tensor([[*tokens[1:], -100]])
        with torch.no_grad():
            scores = decoder.logprobs(torch.tensor([tokens]), labels, temperature=0.8)[0, len(prompt) - 1 : -1]
        assert scores.tolist() == [row.logprob for row in result.outputs[0].logprobs]
