"""What a grid's words mean: its points, their names, and every way to write it wrongly."""

import itertools
import re

import pytest

from headway.cluster.submit.grid import MOST, GridAxis, parse_grid, point_names, points, short_keys
from headway.errors import UsageError


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("train.lr=1e-4,3e-4", "train.lr", ("1e-4", "3e-4")),
        ("seed=1", "seed", ("1",)),
        ("train.schedule = cosine , wsd", "train.schedule", ("cosine", "wsd")),
        ("train.batch_ramp=[[2,4]],[[2,8],[4,16]]", "train.batch_ramp", ("[[2,4]]", "[[2,8],[4,16]]")),
        ('data.path="a,b",c', "data.path", ('"a,b"', "c")),
        ("model.args={a=1,b=2},{a=3}", "model.args", ("{a=1,b=2}", "{a=3}")),
        ("data.path=a=b,c", "data.path", ("a=b", "c")),
    ],
)
def test_values_are_parted_at_the_commas_between_them(text: str, key: str, values: tuple[str, ...]) -> None:
    assert parse_grid([text]) == (GridAxis(key, values),)


@pytest.mark.parametrize(
    ("texts", "settings", "told"),
    [
        ([], [], "nothing to sweep over"),
        (["train.lr"], [], "not of the form"),
        (["=1,2"], [], "not of the form"),
        (["train..lr=1"], [], "not of the form"),
        (["train.lr="], [], "has no values"),
        (["train.lr=,"], [], "has no values"),
        (["train.lr=1,,2"], [], "is empty"),
        (["train.lr=1,2,"], [], "is empty"),
        (["train.lr=1,1"], [], "has 1 twice"),
        (["train.lr=1,2", "train.lr=3"], [], "is there twice"),
        (["train.lr=1,2"], ["train.lr=3"], "by --grid and by --set"),
        (["train.betas=[0.9,0.95"], [], "no partner"),
        (["train.betas=0.9]"], [], "no partner"),
        (["train.betas=[0.9}"], [], "no partner"),
        (['name="a'], [], "no partner"),
        (["seed=" + ",".join(map(str, range(MOST + 1)))], [], "1,001 points"),
        ([f"k{n}=" + ",".join(map(str, range(10))) for n in range(6)], [], "1,000,000 points"),
    ],
)
def test_what_is_no_grid(texts: list[str], settings: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as error:
        parse_grid(texts, settings)
    assert error.value.hint


def test_all_combinations_once_in_their_order() -> None:
    axes = parse_grid(["train.lr=1,2,3", "seed=a,b", "x=only"])
    want = [{"train.lr": lr, "seed": seed, "x": "only"} for lr, seed in itertools.product("123", "ab")]
    assert points(axes) == want


def test_names_can_be_read_and_are_names_of_runs() -> None:
    axes = parse_grid(["train.lr=1e-4,3e-4", "seed=1,2"])
    assert point_names("night", axes) == [
        "night-lr_1e-4-seed_1",
        "night-lr_1e-4-seed_2",
        "night-lr_3e-4-seed_1",
        "night-lr_3e-4-seed_2",
    ]
    assert point_names("n", parse_grid(["data.path=a/b c,x"])) == ["n-path_a_b_c", "n-path_x"]


@pytest.mark.parametrize("text", ["data.path=a/b,a b", "k=" + "x" * 80 + ",y", "k=[1],1"])
def test_names_that_would_be_alike_or_too_long_are_numbers(text: str) -> None:
    assert point_names("night", parse_grid([text])) == ["night-0", "night-1"]


def test_numbers_sort_as_they_count() -> None:
    names = point_names("n", parse_grid(["seed=" + ",".join(str(n) + "x" * 70 for n in range(12))]))
    assert names == sorted(names)
    assert names[11] == "n-11"


def test_keys_that_end_alike_are_told_whole() -> None:
    assert short_keys(parse_grid(["train.steps=1,2", "checkpoint.steps=3", "seed=1"])) == {
        "train.steps": "train.steps",
        "checkpoint.steps": "checkpoint.steps",
        "seed": "seed",
    }
