"""Pipeline cuts against all possible cuts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from headway.hardware import parse_on
from headway.plan.architecture import Architecture
from headway.plan.costs import make_cost_model
from headway.plan.estimate import estimate
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.stages import blocks_of_ranks, layers_of_stages, recomputed_share, stages_by_cost
from headway.plan.trainer import headway_software

LLAMA = Architecture(16, 2048, 32, 8, 64, 8192, 128256)


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """All compositions of a number into that many parts."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for head in range(least, total + 1):
        yield from ((head, *rest) for rest in compositions(total - head, parts - 1, least))


def busiest(counts: tuple[int, ...], first: float, last: float, ranks: int) -> float:
    """Load of the busiest rank, in blocks."""
    loads = [float(sum(counts[rank::ranks])) for rank in range(ranks)]
    loads[0] += first
    loads[-1] += last
    return max(loads)


ENDS = [(0.0, 0.0), (0.1, 2.3), (0.5, 0.5), (1.0, 1.0), (3.7, 0.2), (0.0, 40.0)]


@pytest.mark.parametrize(("first", "last"), ENDS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_cut_minimizes_the_busiest_stage_and_is_most_even(stages, first, last) -> None:
    for layers in range(stages, 13):
        counts = stages_by_cost(layers, first, last, stages)
        every = list(compositions(layers, stages, 1))
        least = min(busiest(counts, first, last, stages) for counts in every)
        best = [counts for counts in every if busiest(counts, first, last, stages) <= least + 1e-9]
        assert counts in best
        squares = [sum(count**2 for count in counts) for counts in best]
        assert sum(count**2 for count in counts) == min(squares)


@pytest.mark.parametrize(("first", "last"), ENDS)
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 3), (3, 2)])
def test_interleaved_cut_balances_ranks(ranks, chunks, first, last) -> None:
    for layers in range(ranks * chunks, 11):
        counts = stages_by_cost(layers, first, last, ranks, chunks)
        assert sum(counts) == layers
        assert len(counts) == ranks * chunks
        assert min(counts) >= 1
        least = min(busiest(counts, first, last, ranks) for counts in compositions(layers, ranks * chunks, 1))
        assert busiest(counts, first, last, ranks) == pytest.approx(least)


def test_fewer_blocks_than_stages_leaves_stages_empty() -> None:
    assert sorted(stages_by_cost(3, 0.0, 1.0, 5)) == [0, 0, 1, 1, 1]
    assert stages_by_cost(3, 0.0, 1.0, 5)[-1] == 0


def test_free_ends_give_even_stages() -> None:
    random = Random(5)
    for _ in range(200):
        stages = random.randint(1, 16)
        layers = random.randint(stages, 130)
        counts = stages_by_cost(layers, 0.0, 0.0, stages)
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == sum(layers_of_stages(layers, stages)) == layers


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_headway_steps_are_cut_by_cost_and_near_optimal(schedule, chunks) -> None:
    """A vocabulary of 128,256 costs as much as several of these layers; a cut by cost is near the best of all."""
    costs = make_cost_model(parse_on("h100x4"))
    software = headway_software(compiled=False, autocasts=True, older=False)
    settings = Settings(Mesh(pipeline=4), 4096, 1, 32, 0, schedule=schedule, chunks=chunks, software=software)
    plan = estimate(LLAMA, settings, costs)
    assert plan.settings.stages is not None
    assert plan.settings.stages[-1] < max(plan.settings.stages)
    ranks = [counts for counts in product(range(1, 9), repeat=4) if sum(counts) == 16]
    cuts = [replace(settings, stages=counts) for counts in ranks] if chunks == 1 else []
    for cut in cuts:
        assert estimate(LLAMA, cut, costs).step.seconds >= 0.97 * plan.step.seconds
    even = estimate(LLAMA, replace(settings, stages=tuple(layers_of_stages(16, 4 * chunks))), costs)
    assert plan.step.seconds < even.step.seconds


def test_other_programs_keep_even_stages() -> None:
    costs = make_cost_model(parse_on("h100x4"))
    settings = Settings(Mesh(pipeline=4), 4096, 1, 32, 0)
    plan, even = (estimate(LLAMA, variant, costs) for variant in (settings, replace(settings, stages=(4, 4, 4, 4))))
    assert plan.settings.stages is None
    assert plan.step.seconds == even.step.seconds


def test_recomputed_layers_are_the_first_of_each_rank() -> None:
    settings = Settings(Mesh(pipeline=2), 128, 1, 8, software=Software(), stages=(1, 5), recompute="full")
    assert blocks_of_ranks(6, settings) == (1, 5)
    for blocks, share in ((None, 1.0), (0, 0.0), (1, 2 / 6), (3, 4 / 6), (9, 1.0)):
        assert recomputed_share(6, replace(settings, recompute_blocks=blocks)) == pytest.approx(share)
