"""The scheduler's promises, on random requests: nothing starves, nothing leaks, limits hold, nothing is changed."""

import copy
import random
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.inference.blocks import BlockPool
from headway.inference.engine import EngineModel, InferenceEngine
from headway.inference.params import SamplingParams
from headway.inference.runner import SampledTokens
from headway.inference.scheduler import Chunk, Limits, schedule
from headway.inference.sequence import UNKNOWN, Sequence
from thinned import examples

VOCABULARY = 50
END_IDS = tuple(range(8))
"""So many that some texts end before their length."""


class Arithmetic:
    """A model whose next token follows from all tokens so far; it reads them through a cache of blocks, as a real one.

    Each place of the cache remembers the token and position written there, so a block that is shared or reused wrongly
    gives another answer.
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.places: list[tuple[int, int] | None] = [None] * (blocks * size)

    def most_steps(self, chunks: tuple[Chunk, ...]) -> int:
        return 0

    def run(self, chunks: tuple[Chunk, ...], last: SampledTokens | None = None):
        rows = []
        for chunk in chunks:
            sequence = chunk.sequence
            for place in range(chunk.first, chunk.first + chunk.count):
                slot = sequence.blocks[place // self.size] * self.size + place % self.size
                token = sequence.token_ids[place]
                if token == UNKNOWN:
                    assert last is not None
                    token = int(last.tokens_R[last.rows[sequence.arrival]])
                self.places[slot] = (place, token)
        for chunk in chunks:
            for place in range(chunk.first, chunk.first + chunk.count):
                slots = (chunk.sequence.blocks[p // self.size] * self.size + p % self.size for p in range(place + 1))
                seen = [self.places[slot] for slot in slots]
                assert [entry[0] for entry in seen] == list(range(place + 1)), "a place holds another position's token"
                rows.append(next_token([entry[1] for entry in seen]))
        return torch.nn.functional.one_hot(torch.tensor(rows), VOCABULARY).float()

    def logits(self, x):
        return x


def next_token(ids: list[int]) -> int:
    return hash(tuple(ids)) % VOCABULARY


def expected(prompt: list[int], count: int, end_ids: tuple[int, ...] = ()) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
        if ids[-1] in end_ids:
            break
    return ids[len(prompt) :]


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 9), st.integers(0, 6)),
    min_size=1,
    max_size=9,
)


@settings(max_examples=examples(80), deadline=None)
@given(requests=prompts, blocks=st.integers(8, 30), size=st.sampled_from([1, 3, 4]), tokens=st.integers(4, 20),
       running=st.integers(1, 3), sharing=st.booleans(), abort=st.integers(0, 20), overlaps=st.booleans())  # fmt: skip
def test_every_request_gets_its_own_tokens(requests, blocks, size, tokens, running, sharing, abort, overlaps) -> None:
    blocks = max(blocks, -(-23 // size))  # room for one request
    pool = BlockPool(blocks, size, shares_prefixes=sharing)
    engine = InferenceEngine(
        Arithmetic(blocks, size),
        EngineModel(VOCABULARY, 100, END_IDS),
        pool,
        Limits(tokens, running),
        overlaps=overlaps,
    )
    outputs: dict[str, list[int]] = {}
    ends: Counter[str] = Counter()
    later = sorted(enumerate(requests), key=lambda entry: entry[1][2])  # each arrives at a step of its own
    step = 0
    while later or engine.busy:
        while later and later[0][1][2] <= step:
            number, (prompt, count, _) = later.pop(0)
            engine.add(str(number), prompt, SamplingParams(max_tokens=count, temperature=0))
            outputs[str(number)] = []
        if step == abort:
            engine.abort("0")
        before = oldest_length(engine)
        continuing = [sequence for sequence in engine.running.values() if sequence.length < sequence.max_length]
        batch = schedule(engine.waiting.values(), continuing, pool, engine.limits)
        assert sum(chunk.count for chunk in batch.chunks) <= tokens
        assert len(continuing) - len(batch.preempted) + len(batch.admitted) <= running
        for output in engine.step():
            if output.token_id is not None:
                outputs[output.request_id].append(output.token_id)
            ends[output.request_id] += output.finish is not None
        check_blocks(engine, pool)
        after = oldest_length(engine)
        assert before is None or after is None or after != before, "the oldest request always goes on"
        step += 1
        assert step < 2000, "it ends"
    for number, (prompt, count, _) in enumerate(requests):
        want = expected(prompt, count, END_IDS)
        made = outputs[str(number)]
        assert made == want if number or (ends["0"] and len(made) == count) else made == want[: len(made)]
    assert all(count == 1 for count in ends.values())
    assert pool.free == pool.count


def oldest_length(engine: InferenceEngine) -> tuple[int, int, int] | None:
    everyone = [*engine.running.values(), *engine.waiting.values()]
    if not everyone:
        return None
    oldest = min(everyone, key=lambda sequence: sequence.arrival)
    return oldest.arrival, oldest.computed, oldest.length


def check_blocks(engine: InferenceEngine, pool: BlockPool) -> None:
    """Every block is held as often as sequences have it; those of a sequence are its own or have its prefix."""
    held = Counter(block for sequence in engine.running.values() for block in sequence.blocks)
    assert [held[block] for block in range(pool.count)] == pool.holders
    assert pool.free == sum(count == 0 for count in pool.holders)
    for sequence in engine.waiting.values():
        assert not sequence.blocks


def make(arrival: int, tokens: int, computed: int = 0, blocks: int = 0, pool: BlockPool | None = None) -> Sequence:
    sequence = Sequence(str(arrival), 0, arrival, list(range(tokens)), SamplingParams(), 100, 0, computed=computed)
    sequence.blocks = pool.allocate(blocks) if pool is not None else []
    return sequence


def test_decoding_comes_before_prompts_and_the_youngest_gives_way() -> None:
    pool = BlockPool(6, 4)
    old = make(0, 9, computed=4, blocks=1, pool=pool)  # a prompt in chunks
    young = make(1, 9, computed=8, blocks=2, pool=pool)  # decodes
    youngest = make(2, 5, computed=4, blocks=3, pool=pool)
    batch = schedule([], [old, young, youngest], pool, Limits(max_batch_tokens=4, max_sequences=3))
    assert batch.preempted == (youngest,)
    assert [(chunk.sequence, chunk.first, chunk.count) for chunk in batch.chunks] == [(young, 8, 1), (old, 4, 3)]


def test_a_waiting_request_is_not_overtaken_by_a_smaller_one() -> None:
    pool = BlockPool(4, 4)
    holder = make(0, 8, computed=7, blocks=2, pool=pool)
    large, small = make(1, 12), make(2, 2)
    batch = schedule([large, small], [holder], pool, Limits(16, 4))
    assert batch.admitted == ()


def test_scheduling_changes_nothing() -> None:
    draw = random.Random(0)
    for _ in range(50):
        pool = BlockPool(12, 2)
        running = [
            make(i, n := draw.randint(1, 8), computed=draw.randint(0, n - 1), blocks=2, pool=pool) for i in range(4)
        ]
        waiting = [make(10 + i, draw.randint(1, 9)) for i in range(3)]
        state = copy.deepcopy((running, waiting, pool.__dict__))
        batches = [schedule(waiting, running, pool, Limits(9, 8)) for _ in range(2)]
        assert batches[0] == batches[1]
        for sequence, before in zip([*running, *waiting], [*state[0], *state[1]], strict=True):
            assert (sequence.computed, sequence.blocks, sequence.length) == (
                before.computed,
                before.blocks,
                before.length,
            )
        assert (pool.holders, pool._idle) == (state[2]["holders"], state[2]["_idle"])
