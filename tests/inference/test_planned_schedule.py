"""The planner's schedule of a closed workload is the engine's: passes of both, under a cost that tells them apart."""

from collections.abc import Sequence as Rows
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.inference.blocks import BlockPool
from headway.inference.decode_graphs import MOST_STEPS
from headway.inference.engine import EngineModel, InferenceEngine
from headway.inference.params import SamplingParams
from headway.inference.sampler import Sampled
from headway.inference.scheduler import Chunk, Limits
from headway.plan.serving_passes import Span
from headway.plan.serving_workload import EngineLimits, Request, forecast
from thinned import examples

VOCABULARY = 4


def cost(decoding: float, cached: float, prompts: list[tuple[float, float, float]]) -> float:
    """Seconds of a pass: of sequences that decode, of their caches, and of prompts (count, start, tokens)."""
    pairs = sum(count * (start * tokens + tokens * tokens / 2) for count, start, tokens in prompts)
    return 7.0 + 0.3 * decoding + 0.001 * cached + 0.01 * pairs


class CountingRunner:
    """A model that takes as long as `cost` says and samples zeros."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rounds = 0
        """Sum of the sequences of each."""
        self.counts: list[list[int]] = []
        """Tokens of each sequence, by round."""

    def most_steps(self, chunks: Rows[Chunk]) -> int:
        return MOST_STEPS if all(chunk.first >= len(chunk.sequence.prompt_ids) for chunk in chunks) else 0

    def run(self, chunks: Rows[Chunk], last: Any = None) -> torch.Tensor:
        decoding = [chunk for chunk in chunks if chunk.count == 1]
        prompts = [(1.0, chunk.first, chunk.count) for chunk in chunks if chunk not in decoding]
        self.seconds += cost(len(decoding), sum(chunk.first for chunk in decoding), prompts)
        self.rounds += len(chunks)
        return torch.zeros(sum(chunk.count for chunk in chunks), VOCABULARY)

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        return x_RD

    def decode(self, chunks: Rows[Chunk], last: Any, counts: Rows[int]) -> Sampled:
        steps = max(counts)
        self.counts.append(list(counts))
        for step in range(steps):
            running = [chunk for chunk, count in zip(chunks, counts, strict=True) if step < count]
            self.seconds += cost(len(running), sum(chunk.first + step for chunk in running), [])
        self.rounds += len(chunks)
        return Sampled(torch.zeros(len(chunks), steps, dtype=torch.int64), torch.zeros(len(chunks), steps))


class CountingModel:
    """The same for the planner."""

    def seconds(self, *spans: Span) -> float:
        decoding = [span for span in spans if span.decodes]
        prompts = [(span.sequences, span.start, span.tokens) for span in spans if span not in decoding]
        cached = sum(span.sequences * span.start for span in decoding)
        return cost(sum(span.sequences for span in decoding), cached, prompts)

    def host_s(self, sequences: float) -> float:
        return sequences


requests = st.lists(st.builds(Request, st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=examples(60), deadline=None)
@given(requests, st.integers(1, 6), st.integers(20, 200))
def test_passes_are_those_of_the_engine(wanted: list[Request], sequences: int, tokens: int) -> None:
    runner = CountingRunner()
    pool = BlockPool(10_000, 4, shares_prefixes=False)
    engine = InferenceEngine(runner, EngineModel(VOCABULARY, 1000), pool, Limits(tokens, sequences))
    for number, request in enumerate(wanted):
        params = SamplingParams(max_tokens=request.output, ignore_eos=True, temperature=0)
        engine.add(str(number), [1] * request.prompt, params)
    while engine.busy:
        engine.step()
    planned = forecast(CountingModel(), wanted, EngineLimits(sequences, tokens, 10**9))  # type: ignore[arg-type]
    assert planned.prefill_s + planned.decode_s == pytest.approx(runner.seconds, rel=1e-9)
    assert planned.host_s == runner.rounds
    assert planned.prefill_passes + planned.decode_passes >= max(request.output for request in wanted)


@pytest.mark.parametrize(
    ("sequences", "rounds"), [(3, [[2, 8, 8], [8, 8], [3, 3]]), (2, [[2, 2], [8, 8], [8, 8], [3]])]
)
def test_a_round_ends_with_a_sequence_only_if_another_waits_for_its_place(
    sequences: int, rounds: list[list[int]]
) -> None:
    """Requests of 3, 20 and 20 tokens, each of whose first is sampled with the prompts."""
    runner = CountingRunner()
    engine = InferenceEngine(
        runner, EngineModel(VOCABULARY, 1000), BlockPool(1000, 4, shares_prefixes=False), Limits(100, sequences)
    )
    for number, tokens in enumerate((3, 20, 20)):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        engine.add(str(number), [1] * 5, params)
    outputs = [output for _ in iter(lambda: engine.busy, False) for output in engine.step()]
    assert runner.counts == rounds
    assert [sum(output.request_id == str(number) for output in outputs) for number in range(3)] == [3, 20, 20]
