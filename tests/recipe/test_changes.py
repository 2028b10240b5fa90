"""What a resumed run may change."""

import re

import pytest

from headway.cli.resume import resume
from headway.errors import RecipeError
from headway.recipe import CHANGEABLE, Data, Model, Recipe, changed_keys, check_resumable, with_settings
from headway.recipe.changes import changeable_keys
from headway.recipe.load import _fields

BASE = Recipe(data=Data(path="d"))


def test_changes_are_listed_by_dotted_key() -> None:
    new = with_settings(BASE, ["train.steps=2000", "checkpoint.keep_last=5"])
    assert changed_keys(BASE, new) == {"train.steps": (1000, 2000), "checkpoint.keep_last": (2, 5)}
    assert check_resumable(BASE, new) == changed_keys(BASE, new)


@pytest.mark.parametrize("setting", ["seed=9", "train.lr=1e-5", "train.batch=64", "model.layers=5", "data.seq=8"])
def test_changes_not_allowed_on_resume_are_refused_by_key(setting: str) -> None:
    with pytest.raises(RecipeError, match=setting.split("=")[0]) as caught:
        check_resumable(BASE, with_settings(BASE, [setting]), "tonight")
    hint = caught.value.hint or ""
    assert setting.split("=")[0] in hint, "the command that does it"
    assert "headway resume --help lists what may change" in hint
    assert sum(key in hint for key in CHANGEABLE) <= 3
    assert len(hint) < 250


def test_resume_help_lists_every_key_that_may_change() -> None:
    text = " ".join((resume.__doc__ or "").split())
    assert f"another run: {', '.join(changeable_keys())}" in text
    patterns = [key.removesuffix("*") for key in changeable_keys() if key.endswith(".*")]
    listed = {key for key in CHANGEABLE if key in changeable_keys() or key.startswith(tuple(patterns))}
    assert listed == set(CHANGEABLE)
    every = {key for key, _ in _fields(Recipe)}
    assert {key for key in every if key.startswith(tuple(patterns))} <= set(CHANGEABLE), "a pattern covers no other key"


@pytest.mark.parametrize(
    ("setting", "command"),
    [
        ("train.lr=1e-05", "headway train --from tonight --set train.lr=1e-05 starts"),
        ("model.layers=5", "headway train RECIPE --set model.layers=5"),
        ("train.optimizer=muon", "headway train RECIPE --set model.init=tonight --set train.optimizer=muon"),
        ("data.version=0123456789ab", "headway train --from tonight --set data.version=0123456789ab --set data.path="),
        ("name=other", "headway train --from tonight --name NAME"),
    ],
)
def test_refused_change_is_answered_with_a_command_that_is_not_refused(setting: str, command: str) -> None:
    """A fork keeps the model's shape and the optimizer, so that no fork is suggested for those."""
    with pytest.raises(RecipeError) as caught:
        check_resumable(BASE, with_settings(BASE, [setting]), "tonight")
    assert command in (caught.value.hint or "")


@pytest.mark.parametrize("setting", ["train.lr=1e-05", "data.seq=32", "train.optimizer=muon"])
def test_no_fork_of_a_run_that_has_saved_nothing_is_suggested(setting: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_resumable(BASE, with_settings(BASE, [setting]), None)
    assert f"headway train RECIPE --set {setting} starts a new one" in (caught.value.hint or "")


def test_changeable_keys_exist() -> None:
    # A store that is left out is one value; one that is there has keys of its own.
    assert set(CHANGEABLE) - {"checkpoint.store"} <= {key for key, _ in _fields(Recipe)}
    stored = with_settings(BASE, ['checkpoint.store.url="s3://bucket/a"'])
    assert check_resumable(BASE, stored)["checkpoint.store.url"] == (None, "s3://bucket/a")
    assert check_resumable(stored, BASE)["checkpoint.store.url"] == ("s3://bucket/a", None)


def test_missing_section_counts_as_its_defaults() -> None:
    meshed = with_settings(BASE, ["parallel.shard=2"])
    assert changed_keys(BASE, meshed) == {"parallel.shard": (None, 2)}
    assert changed_keys(meshed, with_settings(meshed, ["parallel="])) == {"parallel.shard": (2, None)}
    assert changed_keys(BASE, with_settings(BASE, ["parallel.tensor=1"])) == {}
    assert check_resumable(BASE, with_settings(BASE, ["parallel.tensor=2"])) == {"parallel.tensor": (1, 2)}


OWN = Recipe(model=Model(class_="a.b:C", args={"width": 8, "sizes": [1, 2]}), data=Data(path="d"))


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("model.class=a.b:D", "model.class"),
        ("model.args.width=9", "model.args.width"),
        ("model.args.width=", "model.args.width"),
        ("model.args.depth=2", "model.args.depth"),
        ("model.args.sizes=[1]", "model.args.sizes"),
        ("model.args={}", "model.args.width"),
    ],
)
def test_custom_class_cannot_change_on_resume(setting: str, key: str) -> None:
    with pytest.raises(RecipeError, match=f"{re.escape(key)} cannot change"):
        check_resumable(OWN, with_settings(OWN, [setting]))


def test_layout_of_custom_class_may_change_on_resume() -> None:
    cut = with_settings(OWN, ["model.layout.columns=['blocks.*.q']", "model.layout.blocks=blocks"])
    assert check_resumable(OWN, cut) == {
        "model.layout.columns": ((), ("blocks.*.q",)),
        "model.layout.blocks": (None, "blocks"),
    }
    assert check_resumable(OWN, with_settings(OWN, ["model.layout.share=[]"])) == {}
    assert set(check_resumable(cut, with_settings(cut, ["model.layout="]))) == {
        "model.layout.columns",
        "model.layout.blocks",
    }
