"""Sampling against the processors of `transformers`, counted frequencies, and rows that do not depend on each other."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.inference.params import SamplingParams
from headway.inference.sampler import Sampler, truncated, uniform
from headway.inference.sequence import Sequence
from thinned import examples

CPU = torch.device("cpu")
VOCABULARY = 40


def sequence(arrival: int = 0, output: tuple[int, ...] = (), **params: Any) -> Sequence:
    made = Sequence(str(arrival), 0, arrival, [1, 2, 2], SamplingParams(**params), 100, params.get("seed") or 0)
    made.token_ids += output
    return made


def logits(rows: int = 1, seed: int = 0, size: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=examples(60), deadline=None)
@given(top_k=st.integers(0, 45), top_p=st.floats(0.01, 1), min_p=st.floats(0, 1), seed=st.integers(0, 99))
def test_truncation_keeps_what_transformers_keeps(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = logits(seed=seed).double()
    wanted = scores
    ids = torch.zeros(1, 1, dtype=torch.long)
    for warper in (
        TopKLogitsWarper(top_k) if top_k else None,
        TopPLogitsWarper(top_p) if top_p < 1 else None,
        MinPLogitsWarper(min_p) if min_p else None,
    ):
        wanted = wanted if warper is None else warper(ids, wanted)
    probs, order = scores.softmax(-1).sort(descending=True)
    kept = truncated(probs, *(torch.tensor([[x]]) for x in (top_k or VOCABULARY, top_p if top_p < 1 else 2.0, min_p)))
    ours = set(order[kept > 0].tolist())
    theirs = set(torch.isfinite(wanted[0]).nonzero()[:, 0].tolist())
    edges = {int(order[0, place]) for place in _edges(probs[0], top_k, top_p, min_p)}
    assert ours ^ theirs <= edges, "they may differ where a sum is equal to top_p up to rounding"


def _edges(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    within = probs[: top_k or None]
    ends = (within.cumsum(0) / within.sum()).tolist()
    near = [place for place, end in enumerate(ends) if abs(end - top_p) < 1e-9]
    near += [place for place, p in enumerate(probs.tolist()) if abs(p - min_p * float(probs[0])) < 1e-12]
    return [place + shift for place in near for shift in (0, 1) if place + shift < len(probs)]


def test_penalties_are_those_of_transformers_and_openai() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    scores = logits(seed=3)
    one = sequence(
        output=(5, 5, 7), repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.25, temperature=0
    )
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([one.token_ids]), scores.clone())[0]
    expected[5] -= 0.5 + 2 * 0.25
    expected[7] -= 0.5 + 0.25
    adjusted = Sampler(VOCABULARY, CPU)._adjusted(scores, [one])
    torch.testing.assert_close(adjusted[0], expected)


def test_frequencies_are_the_probabilities() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    sampler, count = Sampler(4, CPU), 4000
    rows = [sequence(seed=seed, temperature=0.7, top_k=3) for seed in range(count)]
    drawn = Counter(sampler.sample(scores.expand(count, -1), rows).tokens_R.tolist())
    weights = {i: math.exp(scores[0, i].item() / 0.7) for i in (0, 1, 2)}
    for i, weight in weights.items():
        share = weight / sum(weights.values())
        assert drawn[i] / count == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count))
    assert drawn[3] == 0


def test_random_numbers_are_even_and_unrelated() -> None:
    numbers = uniform([s for s in range(200) for _ in range(50)], list(range(50)) * 200, CPU).view(200, 50)
    counts = torch.histc(numbers, 20, 0, 1) / 10_000
    assert (counts - 0.05).abs().max() < 0.01
    for left, right in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        assert abs(float(torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1])) < 0.04
    assert len(numbers.unique()) > 9_990


def test_a_row_does_not_depend_on_the_others() -> None:
    """Whatever else is in the batch: other parameters, another order, nothing."""
    sampler = Sampler(VOCABULARY, CPU)
    rows = [
        sequence(0, seed=1),
        sequence(1, temperature=0),
        sequence(2, seed=5, top_p=0.5, logprobs=3),
        sequence(3, (4, 4), seed=6, frequency_penalty=1.0, min_p=0.1),
        sequence(4, seed=7, top_k=4, temperature=3.0),
        sequence(5, seed=8, logit_bias={3: 5.0}),
    ]
    scores = logits(len(rows), seed=8)
    alone = [int(sampler.sample(scores[i : i + 1], [row]).tokens_R) for i, row in enumerate(rows)]
    assert sampler.sample(scores, rows).tokens_R.tolist() == alone
    back = list(reversed(range(len(rows))))
    assert sampler.sample(scores[back], [rows[i] for i in back]).tokens_R.tolist() == alone[::-1]


@pytest.mark.parametrize("temperature", [0, 1e-30])
def test_zero_temperature_takes_the_likeliest(temperature: float) -> None:
    scores = torch.tensor([[-5.0, 1e4, 1e4 - 1, 0.0]]).expand(20, -1)
    rows = [sequence(seed=seed, temperature=temperature) for seed in range(20)]
    assert set(Sampler(4, CPU).sample(scores, rows).tokens_R.tolist()) == {1}


def test_logprobs_are_the_model_s_and_the_kept_mass_is_that_of_truncation() -> None:
    scores = logits(seed=4)
    row = sequence(seed=2, temperature=0.5, top_k=3, logprobs=4, logit_bias={0: 9.0})
    sampled = Sampler(VOCABULARY, CPU).sample(scores, [row])
    truth = scores[0].double().log_softmax(-1)
    assert float(sampled.logprobs_R) == pytest.approx(float(truth[int(sampled.tokens_R)]), abs=1e-5)
    assert sampled.top_ids_RX[0].tolist() == truth.topk(4).indices.tolist()
    biased = scores[0].double()
    biased[0] += 9
    assert float(sampled.kept_R) == pytest.approx(float((biased / 0.5).softmax(-1).topk(3).values.sum()), abs=1e-5)


def test_padding_is_never_sampled_and_ends_wait_for_the_least_length() -> None:
    scores = logits(50, size=VOCABULARY + 24)
    rows = [sequence(seed=seed, temperature=50.0) for seed in range(50)]
    assert max(Sampler(7, CPU).sample(scores, rows).tokens_R.tolist()) < 7
    short = [sequence(seed=seed, temperature=50.0, min_tokens=2, stop_token_ids=(3,)) for seed in range(50)]
    assert not {2, 3} & set(Sampler(7, CPU, end_ids=(2,)).sample(scores, short).tokens_R.tolist())
    long = [sequence(0, (1, 1), seed=seed, temperature=50.0, min_tokens=2) for seed in range(50)]
    assert 2 in Sampler(7, CPU, end_ids=(2,)).sample(scores, long).tokens_R.tolist()
