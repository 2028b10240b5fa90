"""What is planned for a run before it starts, held against the planner itself and against sums done by hand."""

from pathlib import Path

import pytest

from headway.agent import new_run, planned, resume_run
from headway.agent.planned import plan_again, plan_run, unplanned
from headway.errors import RecipeError
from headway.hardware import Devices, parse_on
from headway.plan.estimate import Estimate
from headway.plan.plan import plan
from headway.plan.task import RUNNABLE, Choices
from headway.recipe import Recipe, load_recipe, with_settings
from headway.track import read_plan, read_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
H100 = "NVIDIA H100 80GB HBM3"
SMALL = ["model.layers=12", "model.dim=768", "model.heads=12", "model.kv_heads=12", "model.hidden=2048"]
SMALL += ["model.head_dim=64", "data.seq=1024", "train.batch=64"]


def llama(*settings: str) -> Recipe:
    return load_recipe(RECIPES / "llama3-8b.toml", settings)


def gpus(count: int, name: str = H100) -> Devices:
    return Devices("cuda", count, name)


def best(recipe: Recipe, on: str) -> Estimate:
    """The planner asked directly, with the ceilings that are shipped for H200s."""
    fidelity = "measured" if on.startswith("h200") else "default"
    return plan(recipe, parse_on(on), fidelity=fidelity, choices=Choices(limits=RUNNABLE)).best.estimate


def test_a_plan_fills_in_what_the_recipe_leaves_open_and_is_written_as_the_planner_says() -> None:
    recipe = llama()
    share = recipe.train.batch // 8
    made = plan_run(recipe, gpus(8), 8)
    wanted = best(recipe, "h100x8")
    assert made.notes == ()
    assert made.plan is not None
    assert wanted.settings.microbatch < share, "the whole share of an 8B model does not fit into 80 GB"
    assert made.recipe.train.microbatch == wanted.settings.microbatch
    assert made.recipe.train.checkpoint_activations == (wanted.settings.recompute == "full")
    assert set(made.plan.chosen) == {"train.microbatch", "train.checkpoint_activations"}
    assert made.plan.step_s == wanted.step.seconds
    assert dict(made.plan.accounts_s) == wanted.step.accounts
    assert made.plan.total_bytes == pytest.approx(wanted.memory.total)
    assert made.plan.capacity_bytes == 80 * 2**30
    assert (made.plan.cluster, made.plan.devices, made.plan.mesh["shard"]) == ("h100x8x1", 8, 8)


def test_the_figures_of_a_plan_agree_with_each_other_by_hand() -> None:
    recipe = llama()
    made = plan_run(recipe, gpus(8), 8).plan
    assert made is not None
    assert sum(made.accounts_s.values()) == pytest.approx(made.step_s)
    assert made.tokens_s == pytest.approx(recipe.train.batch * recipe.data.seq / made.step_s)
    # Llama 3 8B: 8.03e9 parameters less the embedding's 0.53e9, and 32 layers x 32 heads x 128 of attention.
    flops = 6 * (8.030e9 - 128256 * 4096) + 6 * 32 * 4096 * recipe.data.seq
    peak = 989.5e12 if recipe.train.dtype == "bfloat16" else 67e12
    assert made.mfu == pytest.approx(made.tokens_s / 8 * flops / peak, rel=1e-3)


@pytest.mark.parametrize("settings", [SMALL, [*SMALL, "train.batch=4096"], [*SMALL, "train.dtype=bfloat16"], []])
@pytest.mark.parametrize("workers", [1, 4, 8])
def test_the_plain_way_is_left_only_where_it_does_not_fit_or_is_slower_by_more(
    settings: list[str], workers: int
) -> None:
    recipe = llama(*settings)
    on = f"h200x{workers}"
    made = plan_run(recipe, gpus(workers, "NVIDIA H200"), workers)
    assert made.plan is not None
    if made.notes:
        assert "does not fit" in made.notes[0]
        return
    share = recipe.train.batch // workers
    # the plain way as a recipe that states it; the planner refuses it where it does not fit
    stated = with_settings(recipe, [f"train.microbatch={share}", "train.checkpoint_activations=false"])
    plain = plan_run(stated, gpus(workers, "NVIDIA H200"), workers)
    assert plain.plan is not None
    keeps = not plain.notes and plain.plan.step_s < 1.03 * best(recipe, on).step.seconds
    assert (made.recipe == recipe) == keeps
    assert made.plan.step_s == (plain.plan.step_s if keeps else best(recipe, on).step.seconds)
    assert made.plan.total_bytes <= made.plan.capacity_bytes


def test_what_the_recipe_states_stays() -> None:
    recipe = llama("train.microbatch=2", "train.checkpoint_activations=true")
    made = plan_run(recipe, gpus(8), 8)
    assert made.recipe == recipe
    assert made.plan is not None
    assert (made.plan.microbatch, made.plan.recompute, dict(made.plan.chosen)) == (2, "full", {})
    half = plan_run(llama("train.checkpoint_activations=true"), gpus(8), 8)
    assert half.recipe.train.checkpoint_activations is True
    assert half.plan is not None
    assert set(half.plan.chosen) == {"train.microbatch"}


def test_a_microbatch_larger_than_the_share_is_the_share() -> None:
    made = plan_run(llama(*SMALL, "train.microbatch=1000"), gpus(8), 8)
    assert made.plan is not None
    assert (made.plan.microbatch, made.recipe.train.microbatch) == (64 // 8, 1000)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cpu_keeps_the_plain_way(workers: int) -> None:
    recipe = llama(*SMALL)
    made = plan_run(recipe, Devices("cpu", 8, "some CPU"), workers)
    assert made.recipe == recipe
    assert made.plan is not None
    assert (made.plan.assumed, made.plan.microbatch, made.plan.recompute) == (True, 64 // workers, "none")


def test_what_fits_nowhere_is_tried_with_the_smallest_change_as_a_note() -> None:
    recipe = llama()
    made = plan_run(recipe, gpus(1, "NVIDIA H200"), 1)
    assert (made.recipe.train.microbatch, made.recipe.train.checkpoint_activations) == (1, True)
    assert made.plan is not None
    assert unplanned(made.recipe, made.plan) == recipe
    assert made.plan.total_bytes > made.plan.capacity_bytes
    # 8.03e9 weights, gradients and two moments of 4 bytes each are 120 GB of 2**30 bytes; two devices halve that
    assert made.plan.total_bytes > 8.03e9 * 16
    assert "does not fit on h200x1x1: needs 1" in made.notes[0]
    assert "it fits on 2 devices instead of 1" in made.notes[0]
    assert made.notes[0].endswith("the run tries what needs least")
    stated = llama("train.microbatch=8", "train.checkpoint_activations=false")
    assert plan_run(stated, gpus(1, "NVIDIA H200"), 1).recipe == stated


def test_a_microbatch_that_only_the_trainer_can_split_is_still_predicted() -> None:
    made = plan_run(llama(*SMALL, "train.microbatch=3"), gpus(8), 8)
    assert "a microbatch of 3 does not divide" in made.notes[0]
    assert made.plan is not None
    assert made.plan.microbatch == 3


def test_an_unknown_chip_and_a_broken_planner_stop_nothing(monkeypatch) -> None:
    recipe = llama()
    made = plan_run(recipe, gpus(8, "NVIDIA Fancy 9000"), 8)
    assert (made.recipe, made.plan) == (recipe, None)
    assert made.notes == (
        "not planned: nothing is known of NVIDIA Fancy 9000; the run goes on as the recipe stands",
    )  # fmt: skip

    def broken(*_: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(planned, "estimate", broken)
    for made in (plan_run(recipe, gpus(8), 8), plan_again(recipe, gpus(8), 8, old=None, before=8)):
        assert (made.recipe, made.plan) == (recipe, None)
        assert "ZeroDivisionError" in made.notes[0]


def test_a_run_that_goes_on_keeps_its_choices_on_the_same_devices_and_makes_new_ones_on_others() -> None:
    stated = llama()
    first = plan_run(stated, gpus(8), 8)
    assert first.plan is not None
    assert unplanned(first.recipe, first.plan) == stated

    same = plan_again(first.recipe, gpus(8), 8, old=first.plan, before=8)
    assert (same.recipe, same.plan) == (first.recipe, first.plan)

    moved = plan_again(first.recipe, gpus(8, "NVIDIA H200"), 8, old=first.plan, before=8)
    fresh = plan_run(stated, gpus(8, "NVIDIA H200"), 8)
    assert (moved.recipe, moved.plan) == (fresh.recipe, fresh.plan)

    lower = with_settings(first.recipe, ["train.microbatch=3"])
    kept = plan_again(lower, gpus(8, "NVIDIA H200"), 8, old=first.plan, before=8)
    assert kept.recipe.train.microbatch == 3, "what a person set since is no choice of the plan's"


def test_a_run_from_before_there_were_plans_keeps_its_bits() -> None:
    recipe = llama()
    made = plan_again(recipe, gpus(8), 8, old=None, before=8)
    assert made.recipe == recipe
    assert made.plan is not None
    assert made.plan.microbatch == recipe.train.batch // 8


def test_the_mesh_of_a_recipe_says_how_many_workers(lab, recipe) -> None:
    lived = lab.train(recipe({"parallel.shard": 2}), workers=None)
    assert lived.outcome.state == "finished", lived.outcome
    assert lived.events("attempt", "agent")[0]["workers"] == 2
    same = lab.train(recipe(), workers=2)
    assert lived.digest == same.digest
    assert lived.chain == same.chain
    made = read_plan(lived.run)
    assert made is not None
    assert (made.devices, made.microbatch, made.from_step) == (2, 4, 0)
    assert made == read_plan(same.run)


def test_other_workers_get_another_plan_from_their_step_on(lab, recipe) -> None:
    run = lab.train(recipe({"train.steps": 4, "parallel.shard": 2}), workers=None).run
    first = read_plan(run)
    lab.resume(run, "train.steps=6")
    assert read_plan(run) == first, "the same workers: the plan holds for all steps"
    with pytest.raises(RecipeError, match=r"parallel\.shard is 2, but 4 workers were asked for"):
        resume_run(run, ["train.steps=8"], workers=4)
    resumed = lab.resume(run, "train.steps=8", "parallel.shard=4")
    assert resumed.outcome.state == "finished", resumed.outcome
    second = read_plan(run)
    assert second is not None
    assert (second.devices, second.from_step) == (4, 6)
    assert read_recipe(run).train.microbatch is None


@pytest.mark.parametrize("axis", ["replicate", "tensor", "pipeline", "context", "expert"])
def test_axes_that_the_trainer_does_not_run_are_refused_by_name(tmp_path: Path, recipe, axis: str) -> None:
    with pytest.raises(RecipeError, match=rf"parallel\.{axis} is 2: this version's trainer runs shard only") as caught:
        new_run(recipe({f"parallel.{axis}": 2, "parallel.shard": 2}), tmp_path / "runs")
    size = 2 if axis == "expert" else 4
    assert f"--mesh shard={size} would run; headway plan --mesh" in (caught.value.hint or "")
    assert not (tmp_path / "runs").exists()


def test_a_damaged_plan_is_as_good_as_none(lab, recipe) -> None:
    run = lab.train(recipe({"train.steps": 4})).run
    good = read_plan(run)
    for content in ("{", '{"format": 2}', "[]"):
        run.plan_file.write_text(content)
        assert read_plan(run) is None
    assert lab.resume(run, "train.steps=6").outcome.state == "finished"
    assert good is not None
    assert read_plan(run) == good.model_copy(update={"from_step": 4})
