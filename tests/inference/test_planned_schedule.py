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

    def decode(self, chunks: Rows[Chunk], last: Any, steps: int) -> Sampled:
        for step in range(steps):
            self.seconds += cost(len(chunks), sum(chunk.first + step for chunk in chunks), [])
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
