"""The search against brute force over every candidate."""

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
from headway.plan.search import RECOMPUTED, lower_bound, search
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.step import cut_stages
from headway.plan.task import RUNNABLE, SearchSpace, TrainerLimits, TrainingTask, trainer_limits
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
    """A cluster, optionally with less memory per device."""
    resized = parse_on(on)
    return resized if gib is None else replace(resized, chip=replace(resized.chip, memory_bytes=int(gib * 2**30)))


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
"""Cases that take long by brute force."""
ALL_CASES = [pytest.param(case, marks=pytest.mark.slow) if case in LONG else case for case in range(len(CASES))]
"""All cases, the long ones among the slow tests."""
NAMES = [f"{i}-{on.name}-{fidelity}" for i, (_, on, fidelity) in enumerate(CASES)]


@cache
def everything(case: int) -> tuple[Estimate, ...]:
    """Estimates of all candidates, whether they fit or not."""
    task, on, fidelity = CASES[case]
    costs = make_cost_model(on, fidelity)
    return tuple(
        estimate(task.architecture, candidate, costs)
        for candidate in candidates(task, on, SearchSpace(), task.seq >= 16384)
    )


def kind(plan: Estimate) -> tuple[int, ...]:
    mesh = plan.settings.mesh
    return mesh.tensor, mesh.pipeline, mesh.context, mesh.expert


def best_of_kinds(plans: list[Estimate]) -> list[Estimate]:
    """The fastest of each kind, ties broken by less recomputation and memory; fastest kind first."""
    least = RECOMPUTED.index
    ordered = sorted(
        plans, key=lambda plan: (plan.step.seconds, least(plan.settings.recompute), plan.memory.total, kind(plan))
    )
    first: dict[tuple[int, ...], Estimate] = {}
    for plan in ordered:
        first.setdefault(kind(plan), plan)
    return list(first.values())


@pytest.mark.parametrize("case", ALL_CASES, ids=NAMES)
def test_search_matches_brute_force(case):
    task, on, fidelity = CASES[case]
    fit = [plan for plan in everything(case) if plan.memory.fits]
    wanted = best_of_kinds(fit)[:8]
    result = search(task, make_cost_model(on, fidelity))
    plans = [plan.estimate for plan in result.plans]
    assert [kind(plan) for plan in plans[: len(wanted)]] == [kind(plan) for plan in wanted]
    assert [plan.step.seconds for plan in plans[: len(wanted)]] == [plan.step.seconds for plan in wanted]
    assert [plan.memory.total for plan in plans[: len(wanted)]] == [plan.memory.total for plan in wanted]
    assert result.tried == len(everything(case))
    # the best that the trainer runs is among them, or comes last
    limits = trainer_limits(task.architecture)
    able = min((plan.step.seconds for plan in fit if limits.allows(plan.settings)), default=None)
    assert (result.runnable and result.runnable.estimate.step.seconds) == able
    assert len(plans) <= len(wanted) + 1


@pytest.mark.parametrize(("arch", "runs"), [(FEW_EXPERTS, False), (replace(FEW_EXPERTS, experts=None), True)])
def test_the_trainer_has_no_tensor_axis_with_experts(arch: Architecture, runs: bool) -> None:
    only = SearchSpace(mesh=Mesh(shard=4, tensor=2), zero=(3,), moment_bytes=(4,))
    result = search(TrainingTask(arch, 2048, 64), make_cost_model(parse_on("h100x8")), only)
    assert result.best is not None
    assert (result.runnable is not None) == runs


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


def test_limit_bound_without_pipeline_lacks_only_the_optimizer():
    task, on, fidelity = CASES[1]
    costs = make_cost_model(on, fidelity)
    plans = [plan for plan in everything(1) if plan.settings.mesh.pipeline == 1]
    assert plans
    for plan in plans:
        bound = lower_bound(task, plan.settings, costs) + plan.step.accounts["optimizer"]
        assert bound == pytest.approx(plan.step.seconds, rel=1e-9)


# -- as little recomputed as memory allows


def least_blocks(task: TrainingTask, candidate: Settings, on: Cluster) -> int | None:
    """The fewest recomputed blocks that fit, by counting up."""
    for blocks in range(task.architecture.layers + 1):
        trial = replace(candidate, recompute_blocks=blocks)
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
def test_fewest_layers_that_fit_are_recomputed(kinds, tight) -> None:
    task, on = tight
    costs, choices = make_cost_model(on), SearchSpace(limits=RUNNABLE, least_blocks=True, recompute=kinds)
    all_candidates = []
    for candidate in candidates(task, on, choices):
        cut = cut_stages(task.architecture, candidate, costs)
        blocks = least_blocks(task, cut, on)
        if cut.recompute == "none" and blocks != 0:
            continue
        if blocks is not None:
            all_candidates.append(estimate(task.architecture, replace(cut, recompute_blocks=blocks), costs))
    best = search(task, costs, choices).plans[0].estimate
    assert best.memory.fits
    assert best.step.seconds == min(plan.step.seconds for plan in all_candidates)
    if best.settings.recompute != "none" and best.settings.recompute_blocks is not None:
        assert best.settings.recompute_blocks == least_blocks(task, best.settings, on)


def test_partial_recomputation_is_chosen() -> None:
    """A device with memory for more than full recomputation and less than none."""
    task, on = TIGHT[3]
    costs = make_cost_model(on)
    some = search(task, costs, SearchSpace(limits=RUNNABLE, least_blocks=True, microbatches=(2,))).plans[0].estimate
    every = search(task, costs, SearchSpace(limits=RUNNABLE, microbatches=(2,))).plans[0].estimate
    assert some.settings.recompute_blocks in range(1, 16)
    assert some.step.seconds < every.step.seconds


def test_keeping_weights_depends_on_time_and_memory() -> None:
    """A second gather between nodes costs time, and is chosen if memory is short."""
    both = SearchSpace(mesh=Mesh(shard=32), limits=RUNNABLE, keeps_weights=(False, True), microbatches=(1,))
    task = TrainingTask(EIGHT, 4096, 32, OWN)
    roomy, tight = (search(task, make_cost_model(cluster("h100x8x4", gib)), both).plans[0] for gib in (80, 22))
    assert roomy.estimate.settings.keeps_weights
    assert not tight.estimate.settings.keeps_weights


# -- outside of what is sensible


def uneven_settings(task: TrainingTask, on: Cluster) -> list[Settings]:
    """Every split into copies and shards, every number of chunks and microbatch, also those that candidates exclude."""
    all_candidates = {}
    for candidate in candidates(task, on, SearchSpace(), task.seq >= 16384):
        mesh, share = candidate.mesh, task.batch // candidate.mesh.data
        for shard in (n for n in range(1, mesh.data + 1) if mesh.data % n == 0):
            split = replace(mesh, replicate=mesh.data // shard, shard=shard)
            limit = task.architecture.layers // mesh.pipeline
            for chunks in range(2, limit + 1) if candidate.schedule == "interleaved" else (1,):
                for size in (n for n in range(1, share + 1) if share % n == 0):
                    if candidate.schedule != "interleaved" or (share // size) % mesh.pipeline == 0:
                        settings = replace(candidate, mesh=split, chunks=chunks, microbatch=size)
                        all_candidates[settings] = None
    return list(all_candidates)


@pytest.mark.parametrize(
    ("task", "on"),
    [
        pytest.param(TrainingTask(GROUPED, 4096, 16), cluster("h100x8", 20), marks=pytest.mark.slow),
        (TrainingTask(replace(EIGHT, layers=14), 4096, 16), cluster("h100x4x2", 30)),
        (TrainingTask(GPT, 2048, 16), cluster("rtx4090x2x2")),
    ],
)
def test_excluded_candidates_are_not_faster(task, on):
    costs = make_cost_model(on)
    best = search(task, costs).plans[0].estimate.step.seconds
    others = (estimate(task.architecture, candidate, costs) for candidate in uneven_settings(task, on))
    assert min(plan.step.seconds for plan in others if plan.memory.fits) >= best * (1 - 1e-9)


# -- what is said


@pytest.mark.parametrize("case", [5, 9, 14, 20], ids=lambda case: NAMES[case])
def test_reasons_name_the_largest_difference(case):
    task, on, fidelity = CASES[case]
    best, *others = search(task, make_cost_model(on, fidelity)).plans
    assert best.reason == "fastest"
    assert others
    for plan in others:
        step, best_step = plan.estimate.step, best.estimate.step
        slower = re.match(r"([\d.]+) % slower: ([\d.]+) (m?s) more (.+) per step", plan.reason)
        if slower is None:
            assert plan.reason.startswith("as fast")
            assert step.seconds / best_step.seconds < 1.0005
            continue
        assert float(slower[1]) == pytest.approx(100 * (step.seconds / best_step.seconds - 1), abs=0.51)
        differences = [
            step.accounts[name] - best_step.accounts[name] for name in step.accounts if "exposed" not in name
        ]
        differences += [step.exposed[name] - best_step.exposed[name] for name in step.exposed]
        stated = float(slower[2]) / (1e3 if slower[3] == "ms" else 1)
        assert stated == pytest.approx(max(differences), abs=max(0.00051, 0.06 * stated))


def test_reasons_explain_recomputation_by_memory():
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
    result = search(TrainingTask(LARGE, 8192, 2048), make_cost_model(parse_on("h100x8x2048")))
    meshes = [plan.estimate.settings.mesh for plan in result.plans]
    published = next(i for i, mesh in enumerate(meshes) if (mesh.tensor, mesh.pipeline, mesh.data) == (8, 16, 128))
    best, used = result.plans[0].estimate.step.seconds, result.plans[published].estimate.step.seconds
    assert used / best < 1.1
    assert result.estimated < result.tried / 4


def test_plans_that_the_trainer_cannot_run_are_marked():
    result = search(TrainingTask(EIGHT, 8192, 64), make_cost_model(parse_on("h100x8x8")))
    for plan in result.plans:
        settings = plan.estimate.settings
        spread = settings.mesh.owners == 1 or settings.zero == 3
        assert plan.runnable == (spread and settings.schedule != "zero-bubble")
    assert result.runnable is not None


# -- limits, sweeps, mistakes


def test_search_respects_limits():
    result = search(
        TrainingTask(EIGHT, 8192, 64),
        make_cost_model(parse_on("h100x8x8")),
        SearchSpace(limits=TrainerLimits(axes=("tensor", "shard"))),
    )
    assert {
        axis
        for plan in result.plans
        for axis in ("replicate", "pipeline", "context")
        if getattr(plan.estimate.settings.mesh, axis) > 1
    } == set()
    assert any(plan.estimate.settings.mesh.tensor > 1 for plan in result.plans)


def test_context_parallelism_on_short_sequences_only_if_nothing_else_fits():
    task = TrainingTask(replace(GROUPED, layers=2, heads=8, kv_heads=1), 8192, 8)
    roomy = search(task, make_cost_model(cluster("h100x8")))
    tight = search(task, make_cost_model(cluster("h100x8", 6)), SearchSpace(max_tensor=1))
    assert all(plan.estimate.settings.mesh.context == 1 for plan in roomy.plans)
    assert tight.plans
    assert all(plan.estimate.settings.mesh.context > 1 for plan in tight.plans)
    assert not search(task, make_cost_model(cluster("h100x8", 6)), SearchSpace(max_tensor=1, context=False)).plans


def test_search_without_a_fitting_plan():
    result = search(TrainingTask(EIGHT, 8192, 8), make_cost_model(cluster("h100")))
    assert result.plans == ()
    assert result.best is None
    assert result.pruned_by_memory == result.tried > 0


def test_invalid_mesh_is_rejected_with_a_hint():
    with pytest.raises(UsageError, match="8 devices, h100x8x2 has 16"):
        search(TrainingTask(EIGHT, 8192, 32), make_cost_model(parse_on("h100x8x2")), SearchSpace(mesh=Mesh(shard=8)))
    with pytest.raises(UsageError, match="batch of 30") as caught:
        search(
            TrainingTask(EIGHT, 8192, 30),
            make_cost_model(parse_on("h100x8x2")),
            SearchSpace(limits=TrainerLimits(axes=("shard",))),
        )
    assert caught.value.hint == "the nearest that do: 16 and 32"


def test_tensor_axis_crosses_nodes_only_if_nothing_else_fits() -> None:
    """70 billion parameters on sixteen devices: 79 GB each if four split a layer, whatever the size of nodes."""
    large = Architecture(80, 8192, 64, 8, 128, 28672, 128256, tied=False)
    task = TrainingTask(large, 8192, 1024, EAGER)
    short = SearchSpace(context=False)
    result = [search(task, make_cost_model(parse_on(on)), short).best for on in ("h100x2x8", "h100x4x4", "h100x1x16")]
    meshes = {(plan.estimate.settings.mesh.tensor, plan.estimate.settings.mesh.pipeline) for plan in result if plan}
    assert None not in result
    assert meshes == {(4, 4)}
