"""Requests whose output comes whole, at its end: its tokens, log-probabilities and text are those of single outputs."""

import random
from collections.abc import Sequence as Rows
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.tokenizer import train_tokenizer
from headway.inference.blocks import BlockPool
from headway.inference.engine import EngineModel, InferenceEngine
from headway.inference.outputs import Output
from headway.inference.params import SamplingParams
from headway.inference.sampler import Sampled
from headway.inference.scheduler import Chunk, Limits
from headway.inference.sequence import FinishReason
from headway.inference.text_engine import TextEngine
from thinned import examples

VOCABULARY, ENDS, STEPS = 30, (3, 4), 5
TEXT = "def headway(steps):\n    return steps + 1  # Zeit läuft 時間 🎉\n"
TOKENIZER = train_tokenizer([TEXT] * 3, vocab_size=300)


def token(seed: int, place: int) -> int:
    return random.Random(f"{seed}/{place}").randrange(VOCABULARY)


def logprob(seed: int, place: int) -> float:
    return -float(token(seed, place)) / 4


class RandomRunner:
    """Samples noise by seed and place, up to `STEPS` tokens without the host."""

    def most_steps(self, chunks: Rows[Chunk]) -> int:
        return STEPS if all(chunk.first >= len(chunk.sequence.prompt_ids) for chunk in chunks) else 0

    def run(self, chunks: Rows[Chunk], last: Any = None) -> torch.Tensor:
        return torch.zeros(sum(chunk.count for chunk in chunks), 1)

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        return x_RD

    def decode(self, chunks: Rows[Chunk], last: Any, counts: Rows[int]) -> Sampled:
        places = [(c.sequence.seed, [c.first + 1 + step for step in range(max(counts))]) for c in chunks]
        return sampled(places)

    def sample(self, _logits: torch.Tensor, sequences: Rows[Any]) -> Sampled:
        """Stands for the sampler."""
        both = sampled([(sequence.seed, [sequence.length]) for sequence in sequences])
        assert both.logprobs_R is not None
        return Sampled(both.tokens_R[:, 0], both.logprobs_R[:, 0])


def sampled(places: list[tuple[int, list[int]]]) -> Sampled:
    tokens = torch.tensor([[token(seed, place) for place in row] for seed, row in places])
    return Sampled(tokens, torch.tensor([[logprob(seed, place) for place in row] for seed, row in places]))


def text_engine(blocks: int, sequences: int, *, overlaps: bool) -> TextEngine:
    runner = RandomRunner()
    pool, limits = BlockPool(blocks, 4, shares_prefixes=False), Limits(64, sequences)
    model = EngineModel(VOCABULARY, 4 * blocks, ENDS)
    engine = object.__new__(TextEngine)
    engine.loaded = SimpleNamespace(tokenizer=TOKENIZER, adapters=None)  # type: ignore[assignment]
    engine.engine = InferenceEngine(runner, model, pool, limits, overlaps=overlaps)
    engine.engine.sampler = runner  # type: ignore[assignment]
    engine._streams, engine._texts = {}, {}
    return engine


requests = st.lists(
    st.builds(
        lambda prompt, **params: (prompt, SamplingParams(logprobs=0, **params)),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 40),
        seed=st.integers(0, 99),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from(((), (5,))),
        n=st.integers(1, 2),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(60), deadline=None)
@given(wanted=requests, blocks=st.sampled_from((18, 40)), sequences=st.integers(1, 5), overlaps=st.booleans())
def test_a_whole_output_is_what_single_ones_add_up_to(
    wanted: list[tuple[list[int], SamplingParams]], blocks: int, sequences: int, overlaps: bool
) -> None:
    """Some end in the middle of a round without the host, some are preempted."""
    gathered, ended = dict[Any, tuple[list[int], list[float], str]](), dict[Any, FinishReason | None]()
    engine = text_engine(blocks, sequences, overlaps=overlaps)
    for number, (prompt, params) in enumerate(wanted):
        engine.add(str(number), prompt, params)
    while engine.busy:
        for output, text in engine.step():
            key = output.request_id, output.index
            ids, logprobs, before = gathered.setdefault(key, ([], [], ""))
            assert output.token_id is not None
            assert output.logprobs is not None
            gathered[key] = [*ids, output.token_id], [*logprobs, output.logprobs.logprob], before + text
            if output.finish is not None:
                ended[key] = output.finish

    engine = text_engine(blocks, sequences, overlaps=overlaps)
    for number, (prompt, params) in enumerate(wanted):
        engine.add(str(number), prompt, params, whole=True)
    outputs = list[tuple[Output, str]]()
    while engine.busy:
        outputs += engine.step()
    assert len(outputs) == len(ended), "one of each"
    for output, text in outputs:
        key, whole = (output.request_id, output.index), output.whole
        assert whole is not None
        assert ([*whole.token_ids], [*whole.logprobs], text) == gathered[key]
        assert output.finish == ended[key]
    assert engine.engine.counts.output_tokens == sum(len(ids) for ids, _, _ in gathered.values())
    assert engine.engine.pool.free == blocks


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_aborted_request_has_no_output(overlaps: bool) -> None:
    engine = text_engine(40, 2, overlaps=overlaps)
    for name in ("kept", "aborted"):
        engine.add(name, [7], SamplingParams(max_tokens=20, ignore_eos=True, seed=1), whole=True)
    engine.step()
    engine.abort("aborted")
    ended = list[tuple[Output, str]]()
    while engine.busy:
        ended += engine.step()
    assert [output.request_id for output, _ in ended] == ["kept"]
    assert ended[0][0].whole is not None
    assert len(ended[0][0].whole.token_ids) == 20
    assert engine.engine.pool.free == 40
