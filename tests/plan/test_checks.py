"""Validity of settings against independent rules; suggested changes against the memory they need."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from headway.errors import UsageError
from headway.hardware import Cluster, default_cluster, parse_on
from headway.plan.architecture import Architecture, ExpertShape
from headway.plan.candidates import candidates, held_microbatches
from headway.plan.checks import check, divisors, valid
from headway.plan.costs import make_cost_model
from headway.plan.fit_advice import Change, FitAdvice, smallest_change
from headway.plan.memory import memory
from headway.plan.pipeline import StageTime, simulate
from headway.plan.plan import cap_memory, make_task, narrow_space, smaller_states
from headway.plan.plan import plan as make_plan
from headway.plan.search import search
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.task import RUNNABLE, SearchSpace, TrainingTask
from headway.recipe import Recipe, load_recipe, with_settings

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
DENSE = Architecture(layers=24, dim=2048, heads=32, kv_heads=8, head_dim=64, hidden=8192, vocab=50304)
MIXED = replace(DENSE, experts=ExpertShape(count=16, top_k=2, hidden=1408, shared=2, dense_layers=1))
LARGE = Architecture(layers=80, dim=8192, heads=64, kv_heads=8, head_dim=128, hidden=28672, vocab=128256, tied=False)
SIXES = replace(DENSE, heads=48, kv_heads=6, hidden=9216)
ODD = replace(MIXED, experts=ExpertShape(count=16, top_k=2, hidden=1403, shared=1))
NODES = parse_on("h100x8x2")
TWO_CHUNKS = {"schedule": "interleaved", "chunks": 2}


def on_mesh(mesh: Mesh, **changes: object) -> Settings:
    return replace(Settings(mesh, seq=4096, microbatch=1, batch=64), **changes)


CLASHES = [
    # case, settings, numbers in the message, text in the hint
    ("devices", DENSE, on_mesh(Mesh(shard=4, tensor=2)), ("8 devices", "16"), "shard=8"),
    ("devices, any shard size", DENSE, on_mesh(Mesh(shard=4, tensor=3)), ("12 devices", "16"), "multiply to 16"),
    ("heads", replace(DENSE, heads=24, kv_heads=24), on_mesh(Mesh(tensor=16)), ("tensor 16", "24 heads"), "1, 2, 4, 8"),
    ("key-value heads", SIXES, on_mesh(Mesh(tensor=16)), ("tensor 16", "6 key-value"), "1, 2, 3, 6, 12, 24, 48"),
    ("hidden", replace(DENSE, hidden=5461), on_mesh(Mesh(shard=8, tensor=2)), ("tensor 2", "5461"), "tensor may be 1"),
    ("shared experts", ODD, on_mesh(Mesh(shard=8, tensor=2)), ("tensor 2", "1403"), "tensor may be 1"),
    ("sequence", DENSE, on_mesh(Mesh(shard=8, tensor=2), seq=4095), ("tensor 2", "4095"), "4094 and 4096"),
    ("context", DENSE, on_mesh(Mesh(shard=4, context=4), seq=4098), ("context 4", "4098"), "4096 and 4100"),
    ("no experts", DENSE, on_mesh(Mesh(shard=16, expert=4)), ("expert 4", "no experts"), "expert at 1"),
    ("experts", MIXED, on_mesh(Mesh(shard=16, expert=3)), ("expert 3", "16 experts"), "1, 2, 4, 8, 16"),
    ("expert devices", MIXED, on_mesh(Mesh(pipeline=2, shard=8, expert=16)), ("expert 16", "8 devices"), "1, 2, 4, 8"),
    ("experts across copies", MIXED, on_mesh(Mesh(replicate=4, shard=4, expert=8)), ("expert 8", "shard 4"), "1, 2, 4"),
    ("batch", DENSE, on_mesh(Mesh(replicate=2, shard=8), batch=100), ("100", "16 data ranks"), "96 and 112"),
    ("small batch", DENSE, on_mesh(Mesh(shard=16), batch=12), ("12", "16 data ranks"), "do: 16"),
    ("microbatch", DENSE, on_mesh(Mesh(shard=16), batch=192, microbatch=5), ("microbatch of 5", "12"), "4 and 6"),
    ("large microbatch", DENSE, on_mesh(Mesh(shard=16), microbatch=8), ("microbatch of 8", "4 sequences"), "do: 4"),
    ("layers", DENSE, on_mesh(Mesh(pipeline=16), **TWO_CHUNKS), ("24 layers", "32"), "at most 24"),
    ("interleaved", DENSE, on_mesh(Mesh(pipeline=8, shard=2), batch=40, **TWO_CHUNKS), ("20", "8"), "16 or 24"),
    ("stage count", DENSE, on_mesh(Mesh(shard=4, pipeline=4), stages=(8, 8, 8)), ("3 stages", "pipeline 4"), "give 4"),
    ("stage layers", DENSE, on_mesh(Mesh(shard=8, pipeline=2), stages=(12, 13)), ("25 layers", "24"), "sum to 24"),
    ("no pipeline", DENSE, on_mesh(Mesh(shard=16), schedule="zero-bubble"), ("zero-bubble", "pipeline is 1"), "1f1b"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "settings", "named", "hint"), [row[1:] for row in CLASHES], ids=[row[0] for row in CLASHES]
)
def test_conflicts_name_the_numbers_and_a_fix(arch, settings, named, hint):
    with pytest.raises(UsageError) as caught:
        check(arch, settings, NODES)
    assert all(part in caught.value.message for part in named), caught.value.message
    assert hint in (caught.value.hint or ""), caught.value.hint
    assert not valid(arch, settings, NODES)


def possible(arch: Architecture, s: Settings, cluster: Cluster) -> bool:
    """The rules as divisions."""
    m, experts = s.mesh, arch.experts
    if m.replicate * m.shard * m.tensor * m.pipeline * m.context != cluster.devices:
        return False
    widths = [arch.heads] + ([arch.hidden] if not experts or experts.dense_layers else [])
    widths += [experts.hidden * experts.shared] if experts else []
    if any(width % m.tensor for width in widths) or s.seq % (m.context * m.tensor):
        return False
    if arch.kv_heads % m.tensor and m.tensor % arch.kv_heads:
        return False
    if m.expert > 1:
        sharers = (m.shard if s.zero else m.replicate * m.shard) * m.context * m.tensor
        if experts is None or experts.count % m.expert or sharers % m.expert:
            return False
    if s.batch % (m.replicate * m.shard * s.microbatch) or m.pipeline * s.chunks > arch.layers:
        return False
    if s.schedule == "interleaved":
        passes = s.batch // (m.replicate * m.shard * s.microbatch)
        return m.pipeline > 1 and s.chunks > 1 and passes % m.pipeline == 0
    return s.chunks == 1 and (s.schedule == "1f1b" or m.pipeline > 1)


def test_valid_and_check_agree_with_the_rules():
    random, outcomes = Random(3), set()
    for _ in range(6000):
        sizes = [random.choice((1, 1, 2, 3, 4, 8)) for _ in range(5)]
        mesh = Mesh(*sizes, expert=random.choice((1, 1, 2, 3, 8)))
        arch = random.choice((DENSE, MIXED, replace(DENSE, heads=12, kv_heads=4)))
        schedule = random.choice(("1f1b", "1f1b", "interleaved", "zero-bubble"))
        chunks = random.choice((1, 2, 4)) if schedule == "interleaved" else 1
        seq, size, batch = random.choice((1024, 1026, 4096)), random.choice((1, 2, 3)), random.choice((24, 64, 96))
        settings = Settings(mesh, seq, size, batch, random.choice((0, 1, 3)), schedule=schedule, chunks=chunks)
        cluster = replace(NODES, per_node=mesh.devices if random.random() < 0.9 else 8, nodes=1)
        wanted = possible(arch, settings, cluster)
        outcomes.add(wanted)
        assert valid(arch, settings, cluster) == wanted, settings
        if wanted:
            check(arch, settings, cluster)
        else:
            with pytest.raises(UsageError):
                check(arch, settings, cluster)
    assert outcomes == {True, False}


@pytest.mark.parametrize("number", [1, 2, 12, 97, 128, 360, 1001])
def test_divisors(number):
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)
    assert divisors(number, 10) == tuple(n for n in range(1, 11) if number % n == 0)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 5)]
)
def test_held_microbatches_match_the_schedule(schedule, chunks):
    for ranks, times in product((2, 3, 8), (1, 2, 5)):
        settings = Settings(Mesh(pipeline=ranks), 1024, 1, ranks * times, schedule=schedule, chunks=chunks)
        timeline = simulate(schedule, [StageTime(1, 1, 1)] * (ranks * chunks), ranks, ranks * times)
        assert held_microbatches(settings) == max(timeline.in_flight) / chunks


@pytest.mark.parametrize(
    ("settings", "runs"),
    [
        (on_mesh(Mesh(shard=16)), True),
        (on_mesh(Mesh(shard=16), recompute="full", precision="float32"), True),
        (on_mesh(Mesh(), zero=0), True),
        (on_mesh(Mesh(shard=16), zero=1), False),
        (on_mesh(Mesh(shard=16), zero=0), False),
        (on_mesh(Mesh(replicate=16), zero=0), True),
        (on_mesh(Mesh(replicate=2, shard=8)), True),
        (on_mesh(Mesh(shard=8, tensor=2)), True),
        (on_mesh(Mesh(shard=8, pipeline=2)), True),
        (on_mesh(Mesh(replicate=2, shard=2, tensor=2, pipeline=2)), True),
        (on_mesh(Mesh(shard=8, context=2)), True),
        (on_mesh(Mesh(context=16), zero=0), False),
        (on_mesh(Mesh(shard=16, expert=2)), True),
        (on_mesh(Mesh(shard=16), recompute="selective"), True),
        (on_mesh(Mesh(shard=16), recompute="attention"), False),
        (on_mesh(Mesh(pipeline=16), batch=16), True),
        (on_mesh(Mesh(pipeline=16), batch=15), False),
        (on_mesh(Mesh(pipeline=4), batch=12, schedule="zero-bubble", software=Software("eager")), True),
        (on_mesh(Mesh(pipeline=4), batch=11, schedule="zero-bubble", software=Software("eager")), False),
        (on_mesh(Mesh(pipeline=4), batch=3, schedule="zero-bubble", software=Software("eager")), True),
        (on_mesh(Mesh(pipeline=4), batch=12, schedule="zero-bubble"), False),
        (on_mesh(Mesh(pipeline=4), batch=12, **TWO_CHUNKS), True),
        (on_mesh(Mesh(shard=16), precision="fp8"), True),
        (on_mesh(Mesh(shard=16), precision="nvfp4"), False),
        (on_mesh(Mesh(shard=16), software=Software(moment_bytes=2)), True),
        (on_mesh(Mesh(shard=16), software=Software(moment_bytes=1)), False),
    ],
)
def test_runnable_settings_of_the_trainer(settings, runs):
    assert RUNNABLE.allows(settings) == runs


# -- candidates


def enumerated(task: TrainingTask, cluster: Cluster, context: bool) -> set[Settings]:
    """Every candidate by brute force over all numbers, with the rules of `candidates` restated."""
    arch, numbers = task.architecture, [n for n in range(1, cluster.devices + 1) if cluster.devices % n == 0]
    counts = range(1, (arch.experts.count if arch.experts else 1) + 1)
    settings_set = set()
    for replicate, shard, tensor, pipeline, shared, expert in product(*[numbers] * 5, counts):
        mesh = Mesh(replicate, shard, tensor, pipeline, shared, expert)
        if mesh.devices != cluster.devices or tensor > cluster.levels[0].devices or task.batch % mesh.data:
            continue
        if shared > 1 and (not context or task.seq / shared < 2048):
            continue
        zeros = [0] if shard == 1 else []
        if shard * shared > 1 or (arch.experts and mesh.data == 1 and tensor > 1):
            zeros += [1] if replicate == 1 else []
            zeros += [3] if replicate == 1 or pipeline == 1 else []
        orders = [("1f1b", 1)]
        if pipeline > 1:
            even = [
                n for n in range(2, 9) if not arch.layers % (n * pipeline) or not (arch.layers + 2) % (n * pipeline)
            ]
            orders += [("zero-bubble", 1), *(("interleaved", n) for n in even or [2])]
        most = (2**16 if pipeline > 1 else 2**18) * shared / task.seq
        microbatches = [n for n in range(1, task.batch // mesh.data + 1) if n <= most]
        for zero, (schedule, chunks), size, recompute in product(
            zeros, orders, microbatches, ("none", "selective", "full")
        ):
            settings = Settings(
                mesh, task.seq, size, task.batch, zero, recompute, schedule, chunks, task.precision, task.software
            )
            if possible(arch, settings, cluster):
                settings_set.add(settings)
    return settings_set


SMALL = [
    (DENSE, "h100x8", 2048, 16, False),
    (DENSE, "h100x4x3", 8192, 24, True),
    (MIXED, "h100x8", 2048, 8, False),
    (replace(MIXED, layers=7), "gb200x4x2", 4096, 16, True),
    (replace(DENSE, heads=12, kv_heads=4, layers=6), "a100x8x2", 2048, 48, False),
]


@pytest.mark.parametrize(("arch", "on", "seq", "batch", "context"), SMALL)
def test_candidates_match_brute_force_enumeration(arch, on, seq, batch, context):
    task, cluster = TrainingTask(arch, seq, batch), parse_on(on)
    settings = list(candidates(task, cluster, SearchSpace(), context))
    assert len(settings) == len(set(settings))
    assert set(settings) == enumerated(task, cluster, context)


def test_microbatch_sizes_are_capped():
    sizes = {
        settings.microbatch for settings in candidates(TrainingTask(DENSE, 4096, 4096), parse_on("h100"), SearchSpace())
    }
    assert sizes == {1, 2, 4, 8, 16, 32, 64}


def test_candidates_respect_the_search_space():
    choices = SearchSpace(
        mesh=Mesh(shard=4, tensor=2, pipeline=2), microbatches=(2,), recompute=("full",), schedules=("interleaved",),
        chunks=(3,), precisions=("fp8",), moment_bytes=(2, 4), zero=(1,),
    )  # fmt: skip
    settings = list(candidates(TrainingTask(DENSE, 4096, 64), NODES, choices))
    moments = {candidate.software.moment_bytes for candidate in settings}
    assert moments == {2, 4}
    assert len(settings) == 2
    for candidate in settings:
        assert (candidate.mesh, candidate.microbatch, candidate.recompute, candidate.zero) == (
            choices.mesh,
            2,
            "full",
            1,
        )
        assert (candidate.schedule, candidate.chunks, candidate.precision) == ("interleaved", 3, "fp8")


def test_candidates_respect_trainer_limits():
    task = TrainingTask(DENSE, 4096, 64)
    settings = set(candidates(task, NODES, SearchSpace(limits=RUNNABLE)))
    assert settings == {candidate for candidate in candidates(task, NODES, SearchSpace()) if RUNNABLE.allows(candidate)}
    assert {Mesh(shard=16), Mesh(replicate=16), Mesh(shard=4, tensor=2, pipeline=2)} <= {
        candidate.mesh for candidate in settings
    }
    assert {candidate.mesh.context for candidate in settings} == {1}
    assert {candidate.zero for candidate in settings if candidate.mesh.shard > 1} == {3}


# -- models that fit nowhere


def least(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> float:
    """Over all candidates, with and without context parallelism."""
    all_candidates = [candidate for shared in (False, True) for candidate in candidates(task, cluster, choices, shared)]
    return (
        min(
            memory(task.architecture, candidate, cluster, held_microbatches(candidate)).total
            for candidate in all_candidates
        )
        / 2**30
    )


def numbers(sentence: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+(?= GB)", sentence)]


def test_suggested_nodes_are_the_fewest_that_fit():
    task, cluster = TrainingTask(LARGE, 8192, 64), parse_on("h100x8")
    sentence = smallest_change(task, cluster, SearchSpace(limits=RUNNABLE)).sentence
    nodes = int(re.search(r"on (\d+) nodes instead of 1", sentence).group(1))
    needs = {}
    for count in range(1, nodes + 1):
        larger = parse_on(f"h100x8x{count}")
        all_candidates = candidates(task, larger, SearchSpace(limits=RUNNABLE, max_tensor=8))
        all_needs = (
            memory(LARGE, candidate, larger, held_microbatches(candidate)).total / 2**30 for candidate in all_candidates
        )
        needs[count] = min(all_needs, default=float("inf"))
    assert needs[nodes] <= 80
    assert all(needs[count] > 80 for count in range(1, nodes))
    assert numbers(sentence) == pytest.approx([needs[1], 80, needs[nodes]], abs=0.051)


def test_cheapest_change_is_suggested_first():
    task, cluster = TrainingTask(replace(DENSE, layers=48), 8192, 64), parse_on("h100x8")
    fixed = SearchSpace(mesh=Mesh(shard=8), microbatches=(8,), recompute=("none",))
    sentence = smallest_change(task, cluster, fixed).sentence
    full, small = replace(fixed, recompute=("full",)), replace(fixed, microbatches=(2,))
    assert least(task, cluster, fixed) > 80
    assert least(task, cluster, replace(fixed, microbatches=(4,))) > 80
    assert max(least(task, cluster, full), least(task, cluster, small)) < 80
    wanted = [least(task, cluster, fixed), 80, least(task, cluster, small), least(task, cluster, full)]
    assert numbers(sentence)[:4] == pytest.approx(wanted, abs=0.051)
    assert sentence.index("with train.microbatch=2 (") < sentence.index("with train.recompute=full (")


def llama(*settings: str) -> Recipe:
    return load_recipe(RECIPES / "llama3-8b.toml", settings)


def hint_of(recipe: Recipe, cluster: Cluster, mesh: Mesh | None = None) -> FitAdvice | None:
    """What the planner suggests; None if it finds a plan."""
    cluster = cap_memory(cluster, recipe)
    task, space = make_task(recipe, cluster), narrow_space(recipe, cluster, SearchSpace(mesh=mesh))
    result = search(task, make_cost_model(cluster, "default"), space, keep=1)
    return None if result.plans else smallest_change(task, cluster, space, smaller_states(recipe, cluster))


@pytest.mark.parametrize(
    ("settings", "on", "mesh", "first"),
    [
        (["train.microbatch=64", "train.recompute=none"], "h100x8", None, "train.microbatch=4"),
        (["train.microbatch=4", "train.recompute=none"], "h100x8", Mesh(shard=8), "train.microbatch=1"),
        (["train.microbatch=1", "train.recompute=none", "train.memory_gb=50"], "h100x8", Mesh(shard=8), None),
        ([], "h200x1", None, "train.moments=bfloat16"),
        (["train.memory_gb=112"], "h200x1", None, "train.optimizer=adamw-8bit"),
        (["train.memory_gb=90"], "h200x1", None, None),
        (["train.memory_gb=70"], "h100x8", Mesh(replicate=8), "--mesh shard=8"),
        (["train.memory_gb=20"], "h100x8", Mesh(replicate=2, shard=4), None),
        (["train.microbatch=8", "train.recompute=none", "train.memory_gb=24"], "h100x8", Mesh(shard=8), None),
        (["train.memory_gb=26"], "h100x8", Mesh(shard=8), "train.moments=bfloat16"),
        (["train.memory_gb=14"], "h100x8", Mesh(shard=8), None),
        (["train.memory_gb=16"], "h100x8x4", Mesh(replicate=4, shard=8), None),
        (["data.seq=4194304", "train.batch=8"], "h100x8", None, "data.seq=524288"),
    ],
    ids=str,
)
def test_following_any_part_of_a_hint_fits_on_what_the_trainer_runs(
    settings: list[str], on: str, mesh: Mesh | None, first: str | None
) -> None:
    recipe, cluster = llama(*settings), parse_on(on)
    advice = hint_of(recipe, cluster, mesh)
    assert advice is not None
    assert advice.changes, advice.sentence
    assert first is None or advice.changes[0].options == first
    for change in advice.changes:
        followed = with_settings(recipe, change.settings)
        larger = default_cluster(cluster.chip, cluster.per_node, change.nodes or cluster.nodes)
        planned = make_plan(followed, larger, choices=SearchSpace(mesh=change.mesh or mesh), keep=1)
        assert planned.runnable is not None, advice.sentence
        assert planned.runnable.estimate.memory.fits
    order = [cost(change) for change in advice.changes]
    assert order == sorted(order), advice.sentence


def cost(change: Change) -> int:
    """The place of a change in the order of the hint: by its dearest part."""
    if change.nodes is not None:
        return 7
    if change.mesh is not None and not change.settings:
        return 6 if change.mesh.pipeline > 1 else 5 if change.mesh.tensor > 1 else 4
    keys = [setting.partition("=")[0] for setting in change.settings]
    places = {"train.microbatch": 1, "train.recompute": 2, "train.recompute_blocks": 2, "data.seq": 8}
    return max(places.get(key, 3) for key in keys)


def test_no_tensor_axis_is_suggested_where_the_trainer_has_none() -> None:
    recipe = load_recipe(RECIPES / "mixtral-small.toml", ["model.vocab_size=2048", "train.memory_gb=0.02"])
    cluster = parse_on("h100x8")
    task, space = (
        make_task(recipe, cluster),
        narrow_space(recipe, cluster, SearchSpace(mesh=Mesh(replicate=4, shard=2))),
    )
    advice = smallest_change(task, cap_memory(cluster, recipe), space, smaller_states(recipe, cluster))
    assert all(change.mesh is None or change.mesh.tensor == 1 for change in advice.changes)


def test_a_fitting_task_needs_no_change():
    assert smallest_change(TrainingTask(DENSE, 4096, 64), NODES, SearchSpace()).sentence.startswith("it fits: needs ")
