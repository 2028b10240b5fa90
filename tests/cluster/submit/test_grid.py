"""Parsing of grids: their points, run names, and every way to write one wrongly."""

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
def test_values_are_split_at_outer_commas(text: str, key: str, values: tuple[str, ...]) -> None:
    assert parse_grid([text]) == (GridAxis(key, values),)


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], [], "nothing to sweep over"),
        (["train.lr"], [], "expected key=value,value"),
        (["=1,2"], [], "expected key=value,value"),
        (["train..lr=1"], [], "expected key=value,value"),
        (["train.lr="], [], "has no values"),
        (["train.lr=,"], [], "has no values"),
        (["train.lr=1,,2"], [], "has an empty value"),
        (["train.lr=1,2,"], [], "has an empty value"),
        (["train.lr=1,1"], [], "has 1 twice"),
        (["train.lr=1,2", "train.lr=3"], [], "is given twice"),
        (["train.lr=1,2"], ["train.lr=3"], "by --grid and by --set"),
        (["train.betas=[0.9,0.95"], [], "unbalanced"),
        (["train.betas=0.9]"], [], "unbalanced"),
        (["train.betas=[0.9}"], [], "unbalanced"),
        (['name="a'], [], "unbalanced"),
        (["seed=" + ",".join(map(str, range(MOST + 1)))], [], "1,001 points"),
        ([f"k{n}=" + ",".join(map(str, range(10))) for n in range(6)], [], "1,000,000 points"),
    ],
)
def test_invalid_grids_are_refused(texts: list[str], settings: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        parse_grid(texts, settings)
    assert error.value.hint


def test_all_combinations_in_order() -> None:
    axes = parse_grid(["train.lr=1,2,3", "seed=a,b", "x=only"])
    expected = [{"train.lr": lr, "seed": seed, "x": "only"} for lr, seed in itertools.product("123", "ab")]
    assert points(axes) == expected


def test_run_names_are_readable_and_valid() -> None:
    axes = parse_grid(["train.lr=1e-4,3e-4", "seed=1,2"])
    assert point_names("night", axes) == [
        "night-lr_1e-4-seed_1",
        "night-lr_1e-4-seed_2",
        "night-lr_3e-4-seed_1",
        "night-lr_3e-4-seed_2",
    ]
    assert point_names("n", parse_grid(["data.path=a/b c,x"])) == ["n-path_a_b_c", "n-path_x"]


@pytest.mark.parametrize("text", ["data.path=a/b,a b", "k=" + "x" * 80 + ",y", "k=[1],1"])
def test_ambiguous_or_long_names_become_numbers(text: str) -> None:
    assert point_names("night", parse_grid([text])) == ["night-0", "night-1"]


def test_numbered_names_sort_numerically() -> None:
    names = point_names("n", parse_grid(["seed=" + ",".join(str(n) + "x" * 70 for n in range(12))]))
    assert names == sorted(names)
    assert names[11] == "n-11"


def test_keys_with_equal_endings_are_spelled_out() -> None:
    assert short_keys(parse_grid(["train.steps=1,2", "checkpoint.steps=3", "seed=1"])) == {
        "train.steps": "train.steps",
        "checkpoint.steps": "checkpoint.steps",
        "seed": "seed",
    }
