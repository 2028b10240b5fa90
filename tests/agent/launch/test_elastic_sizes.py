"""Speeds that are predicted for the sizes of an elastic run, against the planner; what cannot be a size, and why."""

from pathlib import Path

import pytest

from headway.agent.launch.elastic_sizes import check_elastic, predicted_speeds
from headway.errors import HeadwayError, UsageError
from headway.hardware import Devices, parse_on
from headway.plan.plan import plan
from headway.plan.settings import Mesh
from headway.plan.task import RUNNABLE, SearchSpace
from headway.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


def llama(*settings: str) -> Recipe:
    return load_recipe(RECIPES / "llama3-8b.toml", settings)


def h100s(size: int) -> Devices:
    return Devices("cuda", size, "h100")


def test_speed_of_a_size_is_that_of_the_planner_for_the_same_batch() -> None:
    recipe = llama("train.batch=64")
    speeds = predicted_speeds(recipe, [8, 16], h100s)
    for size, tokens_s in speeds.items():
        choices = SearchSpace(limits=RUNNABLE, mesh=Mesh(shard=size))
        sharded = plan(recipe, parse_on(f"h100x{size}"), choices=choices).best.estimate
        assert tokens_s == pytest.approx(sharded.tokens_s, rel=0.1), "another mesh is taken if it is 10% faster"
        assert tokens_s > 0.97 * sharded.tokens_s
    assert 1.5 < speeds[16] / speeds[8] < 2.2


@pytest.mark.parametrize(
    ("settings", "size", "message", "hint"),
    [
        ((), 1, "its plan needs", "use 2"),
        (("train.batch=12",), 5, "cannot share evenly", "use 4 or 6"),
        (("parallel.tensor=4",), 6, "does not divide 6", "use 4 or 8"),
        (("parallel.tensor=3",), 3, "cannot run", None),
    ],
)
def test_size_that_cannot_be_is_refused_with_the_nearest_that_work(
    settings: tuple[str, ...], size: int, message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as refused:
        predicted_speeds(llama(*settings), [size], h100s)
    assert f"cannot have {size} GPU" in refused.value.message
    assert message in refused.value.message
    assert hint is None or refused.value.hint == hint
    if hint is None:
        assert not str(refused.value.hint).startswith("use "), "no size near works"
        return
    for near in map(int, hint.removeprefix("use ").split(" or ")):
        assert predicted_speeds(llama(*settings), [near], h100s)
    between = range(min(size, near) + 1, max(size, near))
    for other in between:
        with pytest.raises(HeadwayError):
            predicted_speeds(llama(*settings), [other], h100s)


def test_fixed_mesh_is_refused_and_open_ones_are_not() -> None:
    with pytest.raises(UsageError, match=r"its mesh is fixed, parallel.shard is 8") as refused:
        check_elastic(llama("parallel.shard=8"))
    assert refused.value.hint is not None
    assert "leave parallel.shard out" in refused.value.hint
    for settings in ((), ("parallel.tensor=2",)):
        check_elastic(llama(*settings))
