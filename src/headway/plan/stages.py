"""Assigns layers to pipeline stages: evenly, or balanced by the cost of layers, embedding and head."""

from collections.abc import Sequence
from math import floor

from headway.plan.settings import Settings

SLACK = 1e-9
"""Tolerance for rounding, in blocks."""


def stages_by_cost(layers: int, first: float, last: float, stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Blocks per stage that minimize the load of the busiest rank.

    The embedding, on the first stage, costs `first` blocks; head and loss, on the last, cost `last`. Every stage has a
    block if there are enough; of equally good cuts, the most even one wins. With `chunks`, rank r has stages r,
    r + stages and so on, and splits its blocks among them in the same way.
    """
    ranks = _level(layers, _ends(first, last, stages), least=chunks if layers >= stages * chunks else 0)
    counts = [0] * (stages * chunks)
    for rank, blocks in enumerate(ranks):
        loads = [first if rank + i * stages == 0 else 0.0 for i in range(chunks)]
        loads[-1] += last if rank == stages - 1 else 0.0
        counts[rank::stages] = _level(blocks, loads, least=1 if blocks >= chunks else 0)
    return tuple(counts)


def _ends(first: float, last: float, places: int) -> list[float]:
    """What places have to do before they get a block."""
    loads = [0.0] * places
    loads[0] += first
    loads[-1] += last
    return loads


def _level(blocks: int, loads: Sequence[float], least: int) -> list[int]:
    """Blocks per bin, given each bin's load: minimize the largest load, then even out the counts."""
    counts = [least] * len(loads)
    for _ in range(blocks - sum(counts)):
        place = min(range(len(loads)), key=lambda i: loads[i] + counts[i])
        counts[place] += 1
    busiest = max(load + count for load, count in zip(loads, counts, strict=True))
    # again, one block at a time to the bin with fewest, as long as the largest load does not grow
    rooms = [floor(busiest - load + SLACK) for load in loads]
    counts = [least] * len(loads)
    for _ in range(blocks - sum(counts)):
        open_places = [i for i in range(len(loads)) if counts[i] < rooms[i]]
        # of equal ones the least loaded, then the later one, which holds fewer activations
        place = min(open_places, key=lambda i: (counts[i], loads[i], -i))
        counts[place] += 1
    return counts


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Layers per stage, as even as possible; the first and last get fewer since they hold embedding and head."""
    if layers % stages == 0:
        return [layers // stages] * stages
    if stages > 1 and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    low, more = divmod(layers, stages)
    first = (stages - more) // 2
    return [low + (1 if first <= i < first + more else 0) for i in range(stages)]


def stage_counts(layers: int, settings: Settings) -> tuple[int, ...]:
    """Layers per stage: as stated, or as even as possible."""
    return settings.stages or tuple(layers_of_stages(layers, settings.mesh.pipeline * settings.chunks))


def blocks_of_ranks(layers: int, settings: Settings) -> tuple[int, ...]:
    """Layers per pipeline rank, over all its stages."""
    ranks, counts = settings.mesh.pipeline, stage_counts(layers, settings)
    return tuple(sum(counts[rank::ranks]) for rank in range(ranks))


def recomputed_share(layers: int, settings: Settings) -> float:
    """Share of layers that recomputation covers: the first `recompute_blocks` of each rank, or all."""
    if settings.recompute_blocks is None:
        return 1.0
    return sum(min(settings.recompute_blocks, here) for here in blocks_of_ranks(layers, settings)) / layers
