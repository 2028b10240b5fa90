"""Which tokens the next pass computes: a pure function of the queue and the limits.

Sequences are served in the order of arrival. Those that decode get their one token first, then prompts get the rest of
the pass in chunks. If blocks run out, the youngest sequence gives up its own and starts over later (preemption by
recomputation), so that the oldest always goes on: nothing starves, and nothing deadlocks.
"""

from collections.abc import Collection
from dataclasses import dataclass

from headway.inference.blocks import BlockPool
from headway.inference.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """What a pass may hold."""

    max_batch_tokens: int = 2048
    """Tokens of a pass."""
    max_sequences: int = 256
    """Sequences that run at the same time."""

    def __post_init__(self) -> None:
        assert 0 < self.max_sequences < self.max_batch_tokens, "prompts need room beside a token of every sequence"


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a sequence in a pass."""

    sequence: Sequence
    first: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the pass reaches the sequence's end, so that its next token is sampled."""
        return self.first + self.count == self.sequence.length


@dataclass(frozen=True)
class ScheduledBatch:
    """What a pass does."""

    chunks: tuple[Chunk, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    """Sequences that begin to run, the shared prefix of each being its chunk's `first`."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences that give up their blocks before it."""


def schedule(
    waiting: Collection[Sequence], running: Collection[Sequence], pool: BlockPool, limits: Limits
) -> ScheduledBatch:
    """Choose the next pass. Both collections are in the order of arrival; nothing is changed."""
    chosen: dict[int, Chunk] = {}  # by arrival
    needs: dict[int, int] = {}
    active = {sequence.arrival: sequence for sequence in running}
    preempted: list[Sequence] = []
    free, budget = pool.free, limits.max_batch_tokens
    for sequence in sorted(running, key=lambda s: (s.length - s.computed > 1, s.arrival)):
        if sequence.arrival not in active:
            continue
        count = min(sequence.length - sequence.computed, budget)
        need = pool.blocks_for(sequence.computed + count) - len(sequence.blocks)
        while need > free:
            victim = active.pop(max(active))
            preempted.append(victim)
            free += pool.freed_by(victim.blocks)
            if victim.arrival in chosen:
                budget += chosen.pop(victim.arrival).count
                free += needs.pop(victim.arrival)
            if victim is sequence:
                break
        if sequence.arrival in active and count > 0:
            chosen[sequence.arrival] = Chunk(sequence, sequence.computed, count)
            needs[sequence.arrival] = need
            budget, free = budget - count, free - need
    admitted: list[Sequence] = []
    for sequence in waiting if not preempted else ():
        if budget == 0 or len(active) + len(admitted) >= limits.max_sequences:
            break
        shared = shared_blocks(sequence, pool)
        taken = pool.idle_among(shared)
        if taken + pool.blocks_for(sequence.length) - len(shared) > free:
            break
        first = len(shared) * pool.size
        count = min(sequence.length - first, budget)
        chosen[sequence.arrival] = Chunk(sequence, first, count)
        admitted.append(sequence)
        budget -= count
        free -= taken + pool.blocks_for(first + count) - len(shared)
    return ScheduledBatch(tuple(chosen.values()), tuple(admitted), tuple(preempted))


def shared_blocks(sequence: Sequence, pool: BlockPool) -> list[int]:
    """Return the blocks of others that a sequence can begin with; its last token is always computed."""
    if not pool.shares_prefixes or not sequence.shareable:
        return []
    return pool.find(sequence.block_hashes(pool.size)[: (len(sequence.token_ids) - 1) // pool.size])
