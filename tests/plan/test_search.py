"""The search against brute force: every way to run estimated, none left out."""

import re
from dataclasses import replace
from functools import cache

import pytest

from headway.errors import UsageError
from headway.hardware import Cluster, parse_on
from headway.plan.architecture import Architecture, ExpertShape
from headway.plan.candidates import candidates, held_microbatches
from headway.plan.costs import Fidelity, make_cost_model
from headway.plan.estimate import Estimate, estimate
from headway.plan.memory import memory
from headway.plan.search import lower_bound, search
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.step import cut_stages
from headway.plan.task import RUNNABLE, SearchSpace, TrainerLimits, TrainingTask
from headway.plan.trainer import headway_software
from thinned import thinned

GPT = Architecture(12, 768, 12, 12, 64, 3072, 50304, gated=False, rotary=False, positions=2048, layer_norm=True)
GROUPED = Architecture(16, 2048, 32, 8, 64, 8192, 128256)
THREES = Architecture(28, 3072, 24, 8, 128, 8192, 128256)
EIGHT = Architecture(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
FEW_EXPERTS = Architecture(8, 2048, 16, 4, 128, 7168, 32000, experts=ExpertShape(8, 2, 3584))
MANY_EXPERTS = Architecture(
    12, 1024, 16, 16, 64, 5632, 100000, experts=ExpertShape(32, 6, 704, shared=2, dense_layers=1)
)  # fmt: skip
EAGER = Software(
    fusion="eager",
    loss="chunked",
    weight_bytes=4,
    master_bytes=0,
    reduce_bytes=4,
    waits_each_step=False,
    prefetch=False,
)
LARGE = Architecture(126, 16384, 128, 8, 128, 53248, 128256, tied=False)


def cluster(on: str, gib: float | None = None) -> Cluster:
    """A cluster, its devices perhaps with less memory."""
    found = parse_on(on)
    return found if gib is None else replace(found, chip=replace(found.chip, memory_bytes=int(gib * 2**30)))


CASES: list[tuple[TrainingTask, Cluster, Fidelity]] = [
    (TrainingTask(GPT, 2048, 32), cluster("h100"), "default"),
    (TrainingTask(GPT, 2048, 32), cluster("a100x4"), "limit"),
    (TrainingTask(GPT, 2048, 64, EAGER), cluster("a100x8"), "default"),
    (TrainingTask(GPT, 2048, 48), cluster("rtx4090x4x3"), "default"),
    (TrainingTask(GROUPED, 4096, 16), cluster("h100x2"), "default"),
    (TrainingTask(GROUPED, 4096, 64), cluster("h100x8"), "default"),
    (TrainingTask(GROUPED, 4096, 64), cluster("h100x8", 12), "default"),
    (TrainingTask(GROUPED, 8192, 32, EAGER), cluster("h200x8"), "measured"),
    (TrainingTask(GROUPED, 2048, 96), cluster("a100x8x3"), "default"),
    (TrainingTask(GROUPED, 65536, 8), cluster("h100x8x2"), "default"),
    (TrainingTask(GROUPED, 16384, 16), cluster("gb200x4x2", 24), "default"),
    (TrainingTask(THREES, 4096, 48), cluster("h100x8x2", 20), "default"),
    (TrainingTask(THREES, 8192, 24), cluster("gb200x4x3", 30), "limit"),
    (TrainingTask(THREES, 32768, 12), cluster("a100x4x3"), "default"),
    (TrainingTask(EIGHT, 8192, 32), cluster("h100x8x2", 50), "default"),
    (TrainingTask(EIGHT, 4096, 128), cluster("h100x8x8", 20), "default"),
    (TrainingTask(EIGHT, 4096, 64), cluster("a100-40x8x4"), "default"),
    (TrainingTask(EIGHT, 16384, 16, precision="fp8"), cluster("h200x8x2"), "default"),
    (TrainingTask(replace(EIGHT, layers=6), 4096, 16), cluster("h100x8", 16), "limit"),
    (TrainingTask(FEW_EXPERTS, 4096, 32), cluster("h100x8"), "default"),
    (TrainingTask(FEW_EXPERTS, 2048, 32), cluster("h100x8x4", 6), "default"),
    (TrainingTask(FEW_EXPERTS, 16384, 8), cluster("h100x4x2", 9), "default"),
    (TrainingTask(MANY_EXPERTS, 2048, 32), cluster("h100x8", 10), "default"),
    (TrainingTask(MANY_EXPERTS, 4096, 8), cluster("gb200x4x4", 6), "default"),
    (TrainingTask(MANY_EXPERTS, 2048, 16), cluster("a100x8", 5), "limit"),
]  # fmt: skip
LONG = {3, 8, 9, 11, 13, 14, 15, 16, 17, 19, 20, 21, 22, 23}
"""Cases of which brute force takes long."""
ALL_CASES = [pytest.param(case, marks=pytest.mark.slow) if case in LONG else case for case in range(len(CASES))]
"""All cases, the long ones among the slow tests."""
NAMES = [f"{i}-{on.name}-{fidelity}" for i, (_, on, fidelity) in enumerate(CASES)]


@cache
def everything(case: int) -> tuple[Estimate, ...]:
    """All ways to run, estimated, whether they fit or not."""
    task, on, fidelity = CASES[case]
    costs = make_cost_model(on, fidelity)
    return tuple(
        estimate(task.architecture, way, costs) for way in candidates(task, on, SearchSpace(), task.seq >= 16384)
    )


def kind(plan: Estimate) -> tuple[int, ...]:
    mesh = plan.settings.mesh
    return mesh.tensor, mesh.pipeline, mesh.context, mesh.expert


def best_of_kinds(plans: list[Estimate]) -> list[Estimate]:
    """The fastest of each kind, of equals the one that recomputes and holds least; the fastest kind first."""
    least = ("none", "attention", "selective", "full").index
    ordered = sorted(
        plans, key=lambda plan: (plan.step.seconds, least(plan.settings.recompute), plan.memory.total, kind(plan))
    )
    first: dict[tuple[int, ...], Estimate] = {}
    for plan in ordered:
        first.setdefault(kind(plan), plan)
    return list(first.values())


@pytest.mark.parametrize("case", ALL_CASES, ids=NAMES)
def test_the_search_finds_what_brute_force_finds(case):
    task, on, fidelity = CASES[case]
    fit = [plan for plan in everything(case) if plan.memory.fits]
    wanted = best_of_kinds(fit)[:8]
    found = search(task, make_cost_model(on, fidelity))
    plans = [plan.estimate for plan in found.plans]
    assert [kind(plan) for plan in plans[: len(wanted)]] == [kind(plan) for plan in wanted]
    assert [plan.step.seconds for plan in plans[: len(wanted)]] == [plan.step.seconds for plan in wanted]
    assert [plan.memory.total for plan in plans[: len(wanted)]] == [plan.memory.total for plan in wanted]
    assert found.tried == len(everything(case))
    # the best that the trainer runs is among them, or comes last
    able = min((plan.step.seconds for plan in fit if RUNNABLE.allows(plan.settings)), default=None)
    assert (found.runnable and found.runnable.estimate.step.seconds) == able
    assert len(plans) <= len(wanted) + 1


@pytest.mark.slow
def test_memory_prunes_in_some_of_the_cases():
    shares = [
        sum(not plan.memory.fits for plan in everything(case)) / len(everything(case)) for case in range(len(CASES))
    ]
    assert sum(share > 0.2 for share in shares) >= 8
    assert sum(share == 0 for share in shares) >= 1


@pytest.mark.parametrize("case", ALL_CASES, ids=NAMES)
def test_no_step_is_shorter_than_its_bound(case):
    task, on, fidelity = CASES[case]
    costs = make_cost_model(on, fidelity)
    for plan in everything(case)[::7]:
        assert lower_bound(task, plan.settings, costs) <= plan.step.seconds * (1 + 1e-9), plan.settings


def test_at_the_speed_of_light_without_a_pipeline_only_the_optimizer_comes_on_top():
    task, on, fidelity = CASES[1]
    costs = make_cost_model(on, fidelity)
    plans = [plan for plan in everything(1) if plan.settings.mesh.pipeline == 1]
    assert plans
    for plan in plans:
        bound = lower_bound(task, plan.settings, costs) + plan.step.accounts["optimizer"]
        assert bound == pytest.approx(plan.step.seconds, rel=1e-9)


# -- as little recomputed as memory allows


def least_blocks(task: TrainingTask, way: Settings, on: Cluster) -> int | None:
    """Counted up from none."""
    for blocks in range(task.architecture.layers + 1):
        trial = replace(way, recompute_blocks=blocks)
        if memory(task.architecture, trial, on, held_microbatches(trial)).fits:
            return blocks
    return None


OWN = headway_software(compiled=False, autocasts=True, older=False)
TIGHT = [
    (TrainingTask(GROUPED, 4096, 64, OWN), cluster("h100x8", 22)),
    (TrainingTask(THREES, 4096, 48, OWN), cluster("h100x4", 60)),
    (TrainingTask(EIGHT, 8192, 16, OWN), cluster("h100x8", 48)),
    (TrainingTask(GROUPED, 8192, 8, OWN), cluster("h100", 46)),
]


@pytest.mark.parametrize(("kinds", "tight"), thinned([("full",), ("none", "selective", "full")], TIGHT))
def test_the_fewest_layers_that_fit_are_recomputed_and_no_other_way_is_faster(kinds, tight) -> None:
    task, on = tight
    costs, choices = make_cost_model(on), SearchSpace(limits=RUNNABLE, least_blocks=True, recompute=kinds)
    ways = []
    for way in candidates(task, on, choices):
        cut = cut_stages(task.architecture, way, costs)
        blocks = least_blocks(task, cut, on)
        if cut.recompute == "none" and blocks != 0:
            continue
        if blocks is not None:
            ways.append(estimate(task.architecture, replace(cut, recompute_blocks=blocks), costs))
    best = search(task, costs, choices).plans[0].estimate
    assert best.memory.fits
    assert best.step.seconds == min(plan.step.seconds for plan in ways)
    if best.settings.recompute != "none" and best.settings.recompute_blocks is not None:
        assert best.settings.recompute_blocks == least_blocks(task, best.settings, on)


def test_between_none_and_all_is_some() -> None:
    """A device with room for more than full recomputation leaves and less than none needs."""
    task, on = TIGHT[3]
    costs = make_cost_model(on)
    some = search(task, costs, SearchSpace(limits=RUNNABLE, least_blocks=True, microbatches=(2,))).plans[0].estimate
    every = search(task, costs, SearchSpace(limits=RUNNABLE, microbatches=(2,))).plans[0].estimate
    assert some.settings.recompute_blocks in range(1, 16)
    assert some.step.seconds < every.step.seconds


def test_whether_weights_are_kept_is_settled_by_time_and_memory() -> None:
    """Between nodes a second gather costs, where memory is short it is paid."""
    both = SearchSpace(mesh=Mesh(shard=32), limits=RUNNABLE, keeps_weights=(False, True), microbatches=(1,))
    task = TrainingTask(EIGHT, 4096, 32, OWN)
    roomy, tight = (search(task, make_cost_model(cluster("h100x8x4", gib)), both).plans[0] for gib in (80, 22))
    assert roomy.estimate.settings.keeps_weights
    assert not tight.estimate.settings.keeps_weights


# -- outside of what is sensible


def uneven_ways(task: TrainingTask, on: Cluster) -> list[Settings]:
    """Every split into copies and shards, every number of chunks and microbatch: also what candidates leave out."""
    ways = {}
    for way in candidates(task, on, SearchSpace(), task.seq >= 16384):
        mesh, share = way.mesh, task.batch // way.mesh.data
        for shard in (n for n in range(1, mesh.data + 1) if mesh.data % n == 0):
            split = replace(mesh, replicate=mesh.data // shard, shard=shard)
            limit = task.architecture.layers // mesh.pipeline
            for chunks in range(2, limit + 1) if way.schedule == "interleaved" else (1,):
                for size in (n for n in range(1, share + 1) if share % n == 0):
                    if way.schedule != "interleaved" or (share // size) % mesh.pipeline == 0:
                        made = replace(way, mesh=split, chunks=chunks, microbatch=size)
                        ways[made] = None
    return list(ways)


@pytest.mark.parametrize(
    ("task", "on"),
    [
        pytest.param(TrainingTask(GROUPED, 4096, 16), cluster("h100x8", 20), marks=pytest.mark.slow),
        (TrainingTask(replace(EIGHT, layers=14), 4096, 16), cluster("h100x4x2", 30)),
        (TrainingTask(GPT, 2048, 16), cluster("rtx4090x2x2")),
    ],
)
def test_nothing_that_candidates_leave_out_is_faster(task, on):
    costs = make_cost_model(on)
    best = search(task, costs).plans[0].estimate.step.seconds
    others = (estimate(task.architecture, way, costs) for way in uneven_ways(task, on))
    assert min(plan.step.seconds for plan in others if plan.memory.fits) >= best * (1 - 1e-9)


# -- what is said


@pytest.mark.parametrize("case", [5, 9, 14, 20], ids=lambda case: NAMES[case])
def test_reasons_name_the_largest_difference(case):
    task, on, fidelity = CASES[case]
    best, *others = search(task, make_cost_model(on, fidelity)).plans
    assert best.reason == "fastest"
    assert others
    for plan in others:
        mine, theirs = plan.estimate.step, best.estimate.step
        slower = re.match(r"([\d.]+) % slower: ([\d.]+) (m?s) more (.+) per step", plan.reason)
        if slower is None:
            assert plan.reason.startswith("as fast")
            assert mine.seconds / theirs.seconds < 1.0005
            continue
        assert float(slower[1]) == pytest.approx(100 * (mine.seconds / theirs.seconds - 1), abs=0.51)
        differences = [mine.accounts[name] - theirs.accounts[name] for name in mine.accounts if "exposed" not in name]
        differences += [mine.exposed[name] - theirs.exposed[name] for name in mine.exposed]
        stated = float(slower[2]) / (1e3 if slower[3] == "ms" else 1)
        assert stated == pytest.approx(max(differences), abs=max(0.00051, 0.06 * stated))


def test_recomputation_is_explained_by_the_memory_that_it_saves():
    task, on = TrainingTask(LARGE, 8192, 2048), parse_on("h100x8x2048")
    plans = [plan for plan in search(task, make_cost_model(on)).plans if "without which" in plan.reason]
    assert plans
    for plan in plans:
        settings = plan.estimate.settings
        assert settings.recompute != "none"
        without = estimate(LARGE, replace(settings, recompute="none"), make_cost_model(on)).memory
        assert not without.fits
        assert plan.reason.endswith(f"without which it needs {without.total / 2**30:.1f} of 80 GB")


def test_a_published_plan_is_among_the_best():
    """The Llama 3 Herd of Models, table 4: 405B on 16,384 H100, 8 tensor x 16 pipeline x 128 data ranks."""
    found = search(TrainingTask(LARGE, 8192, 2048), make_cost_model(parse_on("h100x8x2048")))
    meshes = [plan.estimate.settings.mesh for plan in found.plans]
    published = next(i for i, mesh in enumerate(meshes) if (mesh.tensor, mesh.pipeline, mesh.data) == (8, 16, 128))
    best, used = found.plans[0].estimate.step.seconds, found.plans[published].estimate.step.seconds
    assert used / best < 1.1
    assert found.estimated < found.tried / 4


def test_plans_that_the_trainer_cannot_run_are_marked():
    found = search(TrainingTask(EIGHT, 8192, 64), make_cost_model(parse_on("h100x8x8")))
    for plan in found.plans:
        settings = plan.estimate.settings
        spread = settings.mesh.shard == 1 or settings.zero == 3
        assert plan.runnable == (settings.mesh.context == 1 and spread and settings.schedule != "zero-bubble")
    assert found.runnable is not None


# -- limits, sweeps, mistakes


def test_limits_hold():
    found = search(
        TrainingTask(EIGHT, 8192, 64),
        make_cost_model(parse_on("h100x8x8")),
        SearchSpace(limits=TrainerLimits(axes=("tensor", "shard"))),
    )
    assert {
        axis
        for plan in found.plans
        for axis in ("replicate", "pipeline", "context")
        if getattr(plan.estimate.settings.mesh, axis) > 1
    } == set()
    assert any(plan.estimate.settings.mesh.tensor > 1 for plan in found.plans)


def test_short_sequences_are_shared_only_where_nothing_else_fits():
    task = TrainingTask(replace(GROUPED, layers=2, heads=8, kv_heads=1), 8192, 8)
    roomy = search(task, make_cost_model(cluster("h100x8")))
    tight = search(task, make_cost_model(cluster("h100x8", 6)), SearchSpace(max_tensor=1))
    assert all(plan.estimate.settings.mesh.context == 1 for plan in roomy.plans)
    assert tight.plans
    assert all(plan.estimate.settings.mesh.context > 1 for plan in tight.plans)
    assert not search(task, make_cost_model(cluster("h100x8", 6)), SearchSpace(max_tensor=1, context=False)).plans


def test_nothing_fits():
    found = search(TrainingTask(EIGHT, 8192, 8), make_cost_model(cluster("h100")))
    assert found.plans == ()
    assert found.best is None
    assert found.pruned_by_memory == found.tried > 0


def test_a_mesh_that_clashes_says_so():
    with pytest.raises(UsageError, match="8 devices, h100x8x2 has 16"):
        search(TrainingTask(EIGHT, 8192, 32), make_cost_model(parse_on("h100x8x2")), SearchSpace(mesh=Mesh(shard=8)))
    with pytest.raises(UsageError, match="batch of 30") as caught:
        search(
            TrainingTask(EIGHT, 8192, 30),
            make_cost_model(parse_on("h100x8x2")),
            SearchSpace(limits=TrainerLimits(axes=("shard",))),
        )
    assert caught.value.hint == "the nearest that do: 16 and 32"


def test_where_nothing_else_fits_a_tensor_axis_may_cross_nodes() -> None:
    """70 billion parameters on sixteen devices: 79 GB each if four share a layer, whatever their nodes' size."""
    large = Architecture(80, 8192, 64, 8, 128, 28672, 128256, tied=False)
    task = TrainingTask(large, 8192, 1024, EAGER)
    short = SearchSpace(context=False)
    found = [search(task, make_cost_model(parse_on(on)), short).best for on in ("h100x2x8", "h100x4x4", "h100x1x16")]
    meshes = {(one.estimate.settings.mesh.tensor, one.estimate.settings.mesh.pipeline) for one in found if one}
    assert None not in found
    assert meshes == {(4, 4)}
