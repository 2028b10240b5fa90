"""Plans of runs before they start, compared with the planner itself and with figures computed by hand."""

from itertools import product
from pathlib import Path

import pytest

from headway.agent import new_run, resume_run
from headway.agent.launch import auto_plan
from headway.agent.launch.auto_plan import plan_run, replan_run, unplanned
from headway.agent.launch.mesh_checks import check_axes, check_mesh, count_workers
from headway.errors import RecipeError, UsageError
from headway.hardware import Devices, parse_on
from headway.plan.estimate import Estimate
from headway.plan.plan import plan
from headway.plan.settings import Mesh
from headway.plan.task import RUNNABLE, SearchSpace
from headway.plan.trainer import default_microbatch
from headway.recipe import Model, ModelLayout, Parallel, Recipe, load_recipe, with_settings
from headway.recipe.inference import Inference
from headway.track import read_plan, read_recipe

SLOW = pytest.mark.slow
RECIPES = Path(__file__).parents[3] / "recipes"
H100 = "NVIDIA H100 80GB HBM3"
SMALL = ["model.layers=12", "model.dim=768", "model.heads=12", "model.kv_heads=12", "model.hidden=2048"]
SMALL += ["model.head_dim=64", "data.seq=1024", "train.batch=64"]


def llama(*settings: str) -> Recipe:
    return load_recipe(RECIPES / "llama3-8b.toml", settings)


def gpus(count: int, name: str = H100) -> Devices:
    return Devices("cuda", count, name)


def best(recipe: Recipe, on: str, mesh: Mesh | None = None) -> Estimate:
    """The planner's own answer, with the shipped ceilings of H200s."""
    fidelity = "measured" if on.startswith("h200") else "default"
    return plan(recipe, parse_on(on), fidelity=fidelity, choices=SearchSpace(limits=RUNNABLE, mesh=mesh)).best.estimate


def test_plan_fills_in_open_keys_with_the_figures_of_the_planner() -> None:
    recipe = llama("train.batch=64", "train.memory_gb=36")
    share = recipe.train.batch // 8
    planned = plan_run(recipe, gpus(8), 8)
    expected = best(recipe, "h100x8", Mesh(shard=8))
    assert expected.settings.reduces_each, "8 GB of gradients would wait otherwise"
    assert planned.notes == ()
    assert planned.plan is not None
    assert expected.settings.microbatch < share, "the whole share of an 8B model does not fit into 80 GB"
    assert planned.recipe.train.microbatch == expected.settings.microbatch
    assert planned.recipe.train.recompute == expected.settings.recompute != "none"
    assert planned.recipe.parallel == Parallel(shard=8, keep_weights=expected.settings.keeps_weights, reduce_each=True)
    assert planned.plan.step_s == expected.step.seconds
    assert dict(planned.plan.accounts_s) == expected.step.accounts
    assert planned.plan.total_bytes == pytest.approx(expected.memory.total)
    assert planned.plan.capacity_bytes == 36 * 2**30
    assert (planned.plan.cluster, planned.plan.devices, planned.plan.mesh["shard"]) == ("h100x8x1", 8, 8)


def test_figures_of_a_plan_are_consistent() -> None:
    recipe = llama()
    planned = plan_run(recipe, gpus(8), 8).plan
    assert planned is not None
    assert sum(planned.accounts_s.values()) == pytest.approx(planned.step_s)
    assert planned.tokens_s == pytest.approx(recipe.train.batch * recipe.data.seq / planned.step_s)
    # Llama 3 8B: 8.03e9 parameters less the embedding's 0.53e9, and 32 layers x 32 heads x 128 of attention.
    flops = 6 * (8.030e9 - 128256 * 4096) + 6 * 32 * 4096 * recipe.data.seq
    peak = 989.5e12 if recipe.train.dtype == "bfloat16" else 67e12
    assert planned.mfu == pytest.approx(planned.tokens_s / 8 * flops / peak, rel=1e-3)


BASELINES = {"small": SMALL, "large batch": [*SMALL, "train.batch=4096"], "bf16": [*SMALL, "train.dtype=bfloat16"]}
BASELINES |= {"8B": []}
BY_DEFAULT = {("small", 1), ("large batch", 8), ("bf16", 4), ("8B", 1), ("8B", 8)}


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        pytest.param(settings, workers, id=f"{name}-{workers}", marks=() if (name, workers) in BY_DEFAULT else SLOW)
        for (name, settings), workers in product(BASELINES.items(), (1, 4, 8))
    ],
)
def test_baseline_is_given_up_only_if_it_does_not_fit_or_is_much_slower(settings: list[str], workers: int) -> None:
    recipe = llama(*settings)
    on = f"h200x{workers}"
    planned = plan_run(recipe, gpus(workers, "NVIDIA H200"), workers)
    assert planned.plan is not None
    if planned.notes:
        assert "does not fit" in planned.notes[0]
        return
    share = recipe.train.batch // workers
    # the baseline as a recipe that states it; the planner refuses it if it does not fit
    keys = {"train.microbatch": share, "train.recompute": "none"}
    keys |= {"parallel.shard": workers, "parallel.keep_weights": "false", "parallel.reduce_each": "false"}
    stated = with_settings(recipe, [f"{key}={value}" for key, value in keys.items()])
    baseline = plan_run(stated, gpus(workers, "NVIDIA H200"), workers)
    assert baseline.plan is not None
    fastest, shards = best(recipe, on).step.seconds, best(recipe, on, Mesh(shard=workers)).step.seconds
    unchanged = not baseline.notes and baseline.plan.step_s < 1.03 * fastest
    assert (planned.recipe == recipe) == unchanged
    other = shards if shards < 1.10 * fastest else fastest
    assert planned.plan.step_s == (baseline.plan.step_s if unchanged else other)
    assert planned.plan.total_bytes <= planned.plan.capacity_bytes


def test_stated_keys_stay() -> None:
    stated = ["parallel.keep_weights=false", "parallel.reduce_each=false"]
    recipe = llama("train.microbatch=2", "train.recompute=full", *stated)
    planned = plan_run(recipe, gpus(8), 8)
    assert planned.recipe == recipe
    assert planned.plan is not None
    assert (planned.plan.microbatch, planned.plan.recompute, dict(planned.plan.chosen)) == (2, "full", {})
    half = plan_run(llama("train.recompute=full", *stated), gpus(8), 8)
    assert (half.recipe.train.recompute, half.recipe.train.recompute_blocks) == ("full", None)
    assert half.plan is not None
    assert set(half.plan.chosen) == {"train.microbatch"}


def test_microbatch_larger_than_the_share_is_the_share() -> None:
    planned = plan_run(llama(*SMALL, "train.microbatch=1000"), gpus(8), 8)
    assert planned.plan is not None
    assert (planned.plan.microbatch, planned.recipe.train.microbatch) == (64 // 8, 1000)


@pytest.mark.parametrize("workers", [1, 2])
def test_cpu_keeps_the_settings_as_written(workers: int) -> None:
    recipe = llama(*SMALL)
    planned = plan_run(recipe, Devices("cpu", 8, "some CPU"), workers)
    assert planned.recipe == recipe
    assert planned.plan is not None
    assert (planned.plan.assumed, planned.plan.microbatch, planned.plan.recompute) == (True, 64 // workers, "none")


def test_run_that_does_not_fit_is_tried_and_a_note_names_the_smallest_change() -> None:
    recipe = llama()
    planned = plan_run(recipe, gpus(1, "NVIDIA H200"), 1)
    assert (planned.recipe.train.microbatch, planned.recipe.train.recompute) == (1, "full")
    assert planned.plan is not None
    assert unplanned(planned.recipe, planned.plan) == recipe
    assert planned.plan.total_bytes > planned.plan.capacity_bytes
    # 8.03e9 weights, gradients and two moments of 4 bytes each are 120 GB of 2**30 bytes; two devices halve that
    assert planned.plan.total_bytes > 8.03e9 * 16
    assert "does not fit on h200x1x1: needs 1" in planned.notes[0]
    assert "it fits with train.moments=bfloat16 (" in planned.notes[0]
    assert "or on 2 devices instead of 1" in planned.notes[0]
    assert planned.notes[0].endswith("training with the settings that need least memory")
    stated = llama("train.microbatch=8", "train.recompute=none")
    assert plan_run(stated, gpus(1, "NVIDIA H200"), 1).recipe == stated


def test_microbatch_that_only_the_trainer_can_split_is_still_predicted() -> None:
    planned = plan_run(llama(*SMALL, "train.microbatch=3"), gpus(8), 8)
    assert "a microbatch of 3 does not divide" in planned.notes[0]
    assert planned.plan is not None
    assert planned.plan.microbatch == 3


def test_unknown_gpu_and_broken_planner_do_not_prevent_a_run(monkeypatch) -> None:
    recipe = llama()
    planned = plan_run(recipe, gpus(8, "NVIDIA Fancy 9000"), 8)
    assert (planned.recipe, planned.plan) == (recipe, None)
    assert planned.notes == (
        "not planned: unknown GPU NVIDIA Fancy 9000; training with the recipe as written",
    )  # fmt: skip

    def broken(*_: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(auto_plan, "estimate", broken)
    for planned in (plan_run(recipe, gpus(8), 8), replan_run(recipe, gpus(8), 8, old=None, workers_before=8)):
        assert (planned.recipe, planned.plan) == (recipe, None)
        assert "ZeroDivisionError" in planned.notes[0]


def test_resumed_run_keeps_its_plan_unless_the_devices_change() -> None:
    stated = llama()
    first = plan_run(stated, gpus(8), 8)
    assert first.plan is not None
    assert unplanned(first.recipe, first.plan) == stated

    same = replan_run(first.recipe, gpus(8), 8, old=first.plan, workers_before=8)
    assert (same.recipe, same.plan) == (first.recipe, first.plan)

    moved = replan_run(first.recipe, gpus(8, "NVIDIA H200"), 8, old=first.plan, workers_before=8)
    fresh = plan_run(stated, gpus(8, "NVIDIA H200"), 8)
    assert (moved.recipe, moved.plan) == (fresh.recipe, fresh.plan)

    lower = with_settings(first.recipe, ["train.microbatch=3"])
    edited = replan_run(lower, gpus(8, "NVIDIA H200"), 8, old=first.plan, workers_before=8)
    assert edited.recipe.train.microbatch == 3, "what a person set since is not part of the plan"


def test_run_without_a_plan_keeps_its_bits() -> None:
    recipe = llama()
    planned = replan_run(recipe, gpus(8), 8, old=None, workers_before=8)
    assert planned.recipe == recipe
    assert planned.plan is not None
    assert planned.plan.microbatch == recipe.train.batch // 8


# -- meshes


def test_other_mesh_is_chosen_if_much_faster_and_goes_with_its_plan() -> None:
    """With so little memory a shard axis alone does not fit."""
    recipe = llama("train.memory_gb=26")
    planned = plan_run(recipe, gpus(8), 8)
    expected = best(recipe, "h100x8")
    assert planned.plan is not None
    assert planned.recipe.parallel is not None
    with pytest.raises(UsageError, match="does not fit"):
        best(recipe, "h100x8", Mesh(shard=8))
    assert planned.plan.step_s == expected.step.seconds
    parallel, mesh = planned.recipe.parallel, expected.settings.mesh
    assert (parallel.replicate, parallel.shard, parallel.tensor, parallel.pipeline) == (
        mesh.replicate, mesh.shard, mesh.tensor, mesh.pipeline,
    )  # fmt: skip
    assert (parallel.schedule, parallel.chunks) == (expected.settings.schedule, expected.settings.chunks)
    assert parallel.stages == expected.settings.stages
    assert unplanned(planned.recipe, planned.plan) == recipe

    # as read back from the run folder, where tuples are lists
    old = type(planned.plan).model_validate_json(planned.plan.model_dump_json())
    again = replan_run(planned.recipe, gpus(8), 8, old=old, workers_before=8)
    assert again.recipe == planned.recipe
    assert again.plan == old
    fewer = replan_run(planned.recipe, gpus(4), 4, old=old, workers_before=8)
    fresh = plan_run(recipe, gpus(4), 4)
    assert (fewer.recipe, fewer.plan) == (fresh.recipe, fresh.plan)

    # an axis that a person sets is no longer part of the plan: the others return to their defaults
    person = with_settings(planned.recipe, ["parallel.tensor=4"])
    assert unplanned(person, planned.plan).parallel == Parallel(tensor=4)
    replanned = replan_run(person, gpus(8), 8, old=old, workers_before=8)
    assert replanned.plan is not None
    assert (replanned.plan.mesh["tensor"], replanned.plan.mesh["shard"], replanned.plan.devices) == (4, 2, 8)


def test_stated_mesh_stays_and_its_open_keys_are_filled_in() -> None:
    recipe = llama("parallel.tensor=2", "parallel.pipeline=2", "parallel.schedule=interleaved")
    planned = plan_run(recipe, gpus(8), 8)
    assert planned.plan is not None
    assert (planned.plan.mesh["shard"], planned.plan.mesh["tensor"], planned.plan.mesh["pipeline"]) == (2, 2, 2)
    assert (planned.plan.schedule, planned.plan.chunks) == ("interleaved", 2)
    assert planned.recipe.parallel is not None
    assert planned.recipe.parallel.shard is None
    assert len(planned.recipe.parallel.stages or ()) == 4
    assert {"train.microbatch", "parallel.stages"} <= set(planned.plan.chosen)
    assert unplanned(planned.recipe, planned.plan) == recipe
    shards = plan_run(llama("parallel.shard=8"), gpus(8, "NVIDIA H200"), 8)
    assert shards.plan is not None
    assert shards.recipe.parallel is not None
    assert shards.recipe.parallel.keep_weights == shards.plan.keeps_weights
    assert unplanned(shards.recipe, shards.plan) == llama("parallel.shard=8")


STAGES = [
    # devices, whether there is a plan
    (Devices("cpu", 8, "some CPU"), True),
    (gpus(4), True),
    (gpus(4, "NVIDIA Fancy 9000"), False),
]


@pytest.mark.parametrize(("devices", "has_plan"), STAGES, ids=["cpu", "gpu", "unknown"])
def test_stages_of_a_pipeline_are_always_filled_in(devices: Devices, has_plan: bool) -> None:
    """Head and loss of a large vocabulary cost several of these layers: the last stage gets fewer."""
    recipe = llama(*SMALL, "parallel.pipeline=4", "parallel.shard=1", "model.layers=16")
    planned = plan_run(recipe, devices, 4)
    assert (planned.plan is not None) == has_plan
    stages = planned.recipe.parallel.stages if planned.recipe.parallel else None
    assert stages is not None
    assert (len(stages), sum(stages)) == (4, 16)
    assert stages[-1] < max(stages)
    size = planned.recipe.train.microbatch
    assert size is not None
    assert 64 % size == 0
    assert 64 // size >= 2 * 4
    stated = with_settings(recipe, ["parallel.stages=[1,5,5,5]", "train.microbatch=16"])
    assert plan_run(stated, devices, 4).recipe.parallel == stated.parallel


def test_custom_class_is_not_planned() -> None:
    model = Model(**{"class": "package.module:Net"}, layout=ModelLayout(blocks="blocks"))
    recipe = llama(*SMALL).model_copy(update={"model": model})
    planned = plan_run(recipe, gpus(8), 8)
    assert (planned.recipe, planned.plan) == (recipe, None)
    assert "package.module:Net" in planned.notes[0]
    pipelined = recipe.model_copy(update={"parallel": Parallel(pipeline=4)})
    filled = plan_run(pipelined, gpus(8), 8).recipe
    assert filled.parallel == pipelined.parallel, "its workers, which know its blocks, split it"
    assert filled.train.microbatch == 4, "32 sequences of a data rank as 8 microbatches for 4 stages"


def test_memory_limit_recomputes_as_few_blocks_as_possible() -> None:
    """On a CPU too: the smallest number whose predicted memory is within the limit."""
    recipe = llama(*SMALL, "train.batch=8", "model.vocab_size=32000")
    devices = Devices("cpu", 8, "some CPU")
    assert plan_run(recipe, devices, 1).plan is not None

    def needs(kind: str, blocks: int) -> float:
        stated = with_settings(recipe, [f"train.recompute={kind}", f"train.recompute_blocks={blocks}"])
        planned = plan_run(stated, devices, 1).plan
        assert planned is not None
        return planned.total_bytes / 2**30

    budgets = []
    for middle in (3, 9):
        budget = (needs("full", middle) + needs("full", middle - 1)) / 2
        stated = with_settings(recipe, ["train.recompute=full", "train.microbatch=8", f"train.memory_gb={budget}"])
        planned = plan_run(stated, devices, 1)
        assert planned.plan is not None
        least = next(blocks for blocks in range(13) if needs("full", blocks) <= budget)
        assert planned.recipe.train.recompute_blocks == least == middle
        assert planned.plan.total_bytes <= budget * 2**30 == pytest.approx(planned.plan.capacity_bytes)
        assert unplanned(planned.recipe, planned.plan) == stated
        budgets.append((middle, budget, planned))

    # a run that resumes with another limit is planned again
    (_, _, before), (blocks, budget, _) = budgets
    changed = with_settings(before.recipe, [f"train.memory_gb={budget}"])
    after = replan_run(changed, devices, 1, old=before.plan, workers_before=1)
    assert after.recipe.train.recompute_blocks == blocks


BAD_MESHES = [
    # settings of a model with 2 layers, 2 heads, 1 KV head, width 32, 8 sequences of 32; what the error names; hint
    ({"tensor": 3}, ("tensor 3", "2 heads"), "tensor may be 1, 2"),
    ({"tensor": 4, "shard": 1}, ("tensor 4", "2 heads"), "tensor may be 1, 2"),
    ({"replicate": 3}, ("train.batch is 8", "3 workers"), "train.batch=6 or 9"),
    ({"replicate": 3, "tensor": 2}, ("train.batch is 8", "3 data ranks of 6 workers"), "train.batch=6 or 9"),
    ({"pipeline": 4}, ("2 layers", "4 pipeline stages"), "may be at most 2"),
    ({"pipeline": 2, "schedule": "interleaved"}, ("2 layers", "4 pipeline stages"), "may be at most 2"),
    ({"pipeline": 2, "stages": (2,)}, ("1 stages", "pipeline 2"), "give 2 numbers"),
    ({"pipeline": 2, "stages": (1, 2)}, ("3 layers", "has 2"), "sum to 2"),
    ({"pipeline": 2, "chunks": 2}, ("1f1b", "one chunk"), "interleaved"),
    ({"schedule": "zero-bubble"}, ("zero-bubble", "pipeline is 1"), "1f1b"),
]


@pytest.mark.parametrize(("mesh", "named", "hint"), BAD_MESHES)
def test_mesh_that_cannot_run_is_refused_before_anything_starts(tmp_path: Path, recipe, mesh, named, hint) -> None:
    with pytest.raises(RecipeError) as caught:
        new_run(recipe({f"parallel.{key}": value for key, value in mesh.items()}), tmp_path / "runs")
    assert all(part in caught.value.message for part in named), caught.value.message
    assert hint in (caught.value.hint or ""), caught.value.hint
    assert not (tmp_path / "runs").exists()


BAD_REST = [
    # settings beside the mesh that clash with it
    ({"parallel.tensor": 2, "data.seq": 31}, ("tensor 2", "31 tokens"), "30 and 32"),
    ({"parallel.tensor": 2, "model.hidden": 95}, ("tensor 2", "95"), "tensor may be 1"),
    ({"parallel.pipeline": 2, "train.microbatch": 3}, ("microbatch of 3", "8 sequences"), "2 and 4"),
    ({"parallel.pipeline": 2, "train.microbatch": 8}, ("at least 2 microbatches", "got 1"), "may be 1, 2, 4"),
    (
        {"parallel.pipeline": 2, "parallel.schedule": "zero-bubble", "train.compile": True},
        ("zero-bubble", "compiled"),
        "parallel.schedule=1f1b",
    ),
]


@pytest.mark.parametrize(("settings", "named", "hint"), BAD_REST)
def test_setting_that_clashes_with_a_mesh_is_named(tmp_path: Path, recipe, settings, named, hint) -> None:
    with pytest.raises(RecipeError) as caught:
        new_run(recipe(settings), tmp_path / "runs")
    assert all(part in caught.value.message for part in named), caught.value.message
    assert hint in (caught.value.hint or ""), caught.value.hint
    assert not (tmp_path / "runs").exists()


CUSTOM_CLASS = [
    ({"tensor": 2}, {}, "parallel.tensor is 2", "model.layout.columns"),
    ({"pipeline": 2}, {}, "parallel.pipeline is 2", "model.layout.blocks"),
    ({"pipeline": 2, "stages": (1, 2, 3)}, {"blocks": "blocks"}, "3 numbers, but the pipeline has 2", "give 2"),
]


@pytest.mark.parametrize(("mesh", "layout", "message", "hint"), CUSTOM_CLASS)
def test_custom_class_needs_a_layout_for_tensor_and_pipeline(recipe, mesh, layout, message, hint) -> None:
    model = Model(**{"class": "package.module:Net"}, layout=ModelLayout(**layout))
    stated = recipe().model_copy(update={"model": model, "parallel": Parallel(**mesh)})
    with pytest.raises(RecipeError) as caught:
        check_mesh(stated, 2)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    good = model.model_copy(update={"layout": ModelLayout(blocks="blocks", columns=("a",), rows=("b",))})
    mesh = {key: value for key, value in mesh.items() if key != "stages"}
    check_mesh(stated.model_copy(update={"model": good, "parallel": Parallel(**mesh)}), 2)


@pytest.mark.parametrize(
    ("mesh", "requested", "default", "count"),
    [
        ({}, None, 8, 8),
        ({"tensor": 2}, None, 8, 8),
        ({"tensor": 2}, 4, 8, 4),
        ({"tensor": 2, "pipeline": 2}, None, 1, 4),
        ({"replicate": 2, "shard": 2, "tensor": 2}, None, 1, 8),
        ({"replicate": 2, "shard": 2, "tensor": 2}, 8, 1, 8),
        ({"tensor": 3}, None, 8, "3 workers, which does not divide 8"),
        ({"tensor": 2, "shard": 2}, 3, 8, "tensor 2: 4 workers, but 3 were requested"),
        ({"shard": 2}, 3, 8, "shard 2: 2 workers, but 3 were requested"),
    ],
)
def test_workers_are_the_product_of_the_axes(recipe, mesh, requested, default, count) -> None:
    stated = recipe({f"parallel.{key}": value for key, value in mesh.items()})
    if isinstance(count, int):
        assert count_workers(stated, requested, default) == count
        return
    with pytest.raises(RecipeError, match=count) as caught:
        count_workers(stated, requested, default)
    assert "--workers" in (caught.value.hint or "")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_default_microbatch_of_a_pipeline_is_the_largest_that_fills_it_twice(recipe, schedule: str) -> None:
    for batch, ranks in product((1, 6, 8, 24, 60, 64), (2, 3, 4)):
        stated = recipe({"train.batch": batch, "parallel.pipeline": ranks, "parallel.schedule": schedule})
        size = default_microbatch(stated, Mesh(pipeline=ranks))
        good = [
            n
            for n in range(1, batch + 1)
            if batch % n == 0 and batch // n >= 2 * ranks
            and (schedule != "interleaved" or (batch // n) % ranks == 0)
            and (schedule != "zero-bubble" or (batch // n) % (batch // n // ranks) == 0)
        ]  # fmt: skip
        assert size == max(good, default=1)


@pytest.mark.slow
def test_mesh_of_a_recipe_sets_the_number_of_workers(lab, recipe) -> None:
    trained = lab.train(recipe({"parallel.shard": 2}), workers=None)
    assert trained.outcome.state == "finished", trained.outcome
    assert trained.events("attempt", "agent")[0]["workers"] == 2
    same = lab.train(recipe(), workers=2)
    assert trained.digest == same.digest
    assert trained.chain == same.chain
    planned = read_plan(trained.run)
    assert planned is not None
    assert (planned.devices, planned.microbatch, planned.from_step) == (2, 4, 0)
    assert planned == read_plan(same.run)


@pytest.mark.slow
def test_pipeline_trains_as_planned_and_resumes_as_shards(lab, recipe) -> None:
    """Eight sequences for two stages: four microbatches of two. On another mesh none of that is left."""
    trained = lab.train(recipe({"train.steps": 4, "parallel.pipeline": 2}), workers=None)
    assert trained.outcome.state == "finished", trained.outcome
    first = read_recipe(trained.run)
    assert first.parallel is not None
    assert (first.train.microbatch, first.parallel.stages) == (2, (1, 1))
    resumed = lab.resume(trained.run, "train.steps=6", "parallel.pipeline=1", "parallel.shard=2")
    assert resumed.outcome.state == "finished", resumed.outcome
    assert read_recipe(trained.run).train.microbatch is None
    assert read_recipe(trained.run).parallel == Parallel(shard=2)
    planned = read_plan(trained.run)
    assert planned is not None
    assert (planned.mesh["shard"], planned.mesh["pipeline"], planned.from_step) == (2, 1, 4)


@pytest.mark.slow
def test_other_number_of_workers_gets_a_new_plan_from_its_step_on(lab, recipe) -> None:
    run = lab.train(recipe({"train.steps": 4, "parallel.shard": 2}), workers=None).run
    first = read_plan(run)
    lab.resume(run, "train.steps=6")
    assert read_plan(run) == first, "the same workers: the plan holds for all steps"
    with pytest.raises(RecipeError, match="shard 2: 2 workers, but 4 were requested"):
        resume_run(run, ["train.steps=8"], workers=4)
    resumed = lab.resume(run, "train.steps=8", "parallel.shard=4")
    assert resumed.outcome.state == "finished", resumed.outcome
    second = read_plan(run)
    assert second is not None
    assert (second.devices, second.from_step) == (4, 6)
    assert read_recipe(run).train.microbatch is None


def test_unsupported_axis_is_refused_by_name(recipe) -> None:
    model = Model(**{"class": "package.module:Net"})
    own = recipe({"parallel.context": 2, "parallel.shard": 2}).model_copy(update={"model": model})
    message = r"parallel\.context is 2, but it does not support model.class package.module:Net"
    with pytest.raises(RecipeError, match=message) as caught:
        check_axes(own)
    assert "shard, replicate, tensor and pipeline" in (caught.value.hint or "")


def test_hint_of_an_unsupported_axis_names_only_axes_that_work(recipe) -> None:
    values = {
        "model": {"family": "dit", "layers": 1, "dim": 16, "heads": 2, "num_classes": 2},
        "data": {"kind": "image", "path": "data"},
        "objective": {"kind": "flow"},
        "parallel": {"context": 2},
    }
    exact = recipe({"parallel.context": 2}).model_copy(update={"inference": Inference(exact=True)})
    for refused, axes in (
        (Recipe.model_validate(values), "shard, replicate and tensor"),
        (exact, "shard and replicate"),
    ):
        with pytest.raises(RecipeError) as caught:
            check_axes(refused)
        assert caught.value.hint == f"its workers need whole sequences: use {axes} axes"


def test_a_run_in_exact_mode_is_planned_with_axes_that_it_can_have() -> None:
    settings = ("train.batch=8", "train.dtype=bfloat16", "data.seq=512", "train.compile=false")
    free, exact = (plan_run(llama(*settings, f"inference.exact={value}"), gpus(8), 8) for value in ("false", "true"))
    assert free.recipe.parallel is not None
    assert free.recipe.parallel.splits_model, "few short rows are fastest so"
    assert exact.recipe.parallel is not None
    assert (exact.recipe.parallel.shard, exact.recipe.parallel.splits_model) == (8, False)


def test_damaged_plan_is_ignored(lab, recipe) -> None:
    run = lab.train(recipe({"train.steps": 4})).run
    good = read_plan(run)
    for content in ("{", '{"format": 2}', "[]"):
        run.plan_file.write_text(content)
        assert read_plan(run) is None
    assert lab.resume(run, "train.steps=6").outcome.state == "finished"
    assert good is not None
    assert read_plan(run) == good.model_copy(update={"from_step": 4})
