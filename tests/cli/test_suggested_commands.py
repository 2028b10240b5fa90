"""Commands that are printed can be copied: --runs is in them, and they are not refused."""

import re
from pathlib import Path

import pytest

import headway
from headway.errors import RecipeError, RunError
from headway.models.custom import load_class
from headway.recipe import Data, Recipe, check_resumable, load_recipe, with_settings
from headway.track import RunFolder, command, find_run

BASE = Recipe(name="demo", data=Data(path="data", seq=64, version="v"))
ABOUT_RUNS = "cancel|checkpoint|diff|fetch|jobs|logs|metrics|report|requeue|resume|runs|sample|stacks|stop|submit|sweep"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)


@pytest.mark.parametrize(
    ("root", "variable", "expected"),
    [
        ("runs", None, ""),
        ("elsewhere", None, " --runs elsewhere"),
        ("my runs", None, " --runs 'my runs'"),
        ("elsewhere", "elsewhere", ""),
        ("runs", "elsewhere", " --runs runs"),
    ],
)
def test_command_names_the_folder_of_runs_where_a_shell_would_look_elsewhere(
    root: str, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("HEADWAY_RUNS", variable)
    assert command(Path(root), "jobs") == f"headway jobs{expected}"
    assert RunFolder(Path(root) / "r").command("logs", "--follow") == f"headway logs r --follow{expected}"
    assert ("--runs" in command(Path(root).absolute(), "jobs")) is bool(expected)
    assert RunFolder(Path(root) / ".failed" / "r").command("logs") == f"headway logs .failed/r{expected}"


def test_commands_about_runs_are_built_in_one_place() -> None:
    """A literal command with a run's name in it would forget --runs."""
    literal = re.compile(rf"headway ({ABOUT_RUNS})( \w+)? \{{(?!ref\b)|next: headway ({ABOUT_RUNS})\b")
    package = Path(headway.__file__).parent
    assert [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for line in path.read_text().splitlines()
        if literal.search(line) and path.name != "nodes.py"  # it has no --runs
    ] == []


def test_hint_for_a_finished_run_has_steps_left_to_do() -> None:
    changed = with_settings(BASE, ["train.lr=1e-3"])
    for reached, more in ((BASE.train.steps, f" --set train.steps={2 * BASE.train.steps}"), (10, "")):
        with pytest.raises(RecipeError) as refused:
            check_resumable(BASE, changed, "r", reached, lambda words: command(Path("d"), "train", words))
        assert refused.value.hint is not None
        hint = refused.value.hint.partition(" starts a new run")[0]
        assert hint == f"headway train --from r --set train.lr=0.001{more} --runs d"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        (["train.steps=20", "train.warmup_steps=20"], "add --set train.warmup_steps=2"),
        (["train.steps=1", "train.warmup_steps=1"], "add --set train.warmup_steps=0"),
        (
            ["train.steps=20", "train.warmup_steps=2", "train.schedule=wsd", "train.decay_steps=19"],
            "add --set train.decay_steps=2",
        ),
        (
            ["train.steps=20", "train.warmup_steps=19", "train.schedule=wsd", "train.decay_steps=20"],
            "add --set train.warmup_steps=2 --set train.decay_steps=2",
        ),
    ],
)
def test_hint_for_a_schedule_longer_than_the_run_is_accepted(settings: list[str], hint: str) -> None:
    with pytest.raises(RecipeError) as refused:
        with_settings(BASE, settings)
    assert refused.value.hint == hint
    added = [word for word in hint.split() if "=" in word]
    assert with_settings(BASE, [*settings, *added]).train.steps in (1, 20)


def test_near_names_of_recipes_and_runs_are_suggested() -> None:
    Path("demo.toml").write_text("")
    (Path("d") / "demo-1" / "events").mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"dmeo\.toml: no such recipe") as no_recipe:
        load_recipe(Path("dmeo.toml"))
    assert no_recipe.value.hint == "did you mean demo.toml?"
    with pytest.raises(RecipeError) as shipped:
        load_recipe(Path("recipes/demoo.toml"))
    assert shipped.value.hint == "did you mean demo? headway recipe cp demo copies it here"
    for ref, hint in (("dmeo-1", "did you mean demo-1?"), ("nosuch", "there are demo-1")):
        with pytest.raises(RunError) as no_run:
            find_run(Path("d"), ref)
        assert no_run.value.hint == f"{hint}  (headway runs --runs d lists all)"


def test_hint_for_a_missing_class_names_the_folder_only_if_it_is_there() -> None:
    with pytest.raises(headway.errors.ModelError) as missing:
        load_class("my_net_q:Net")
    assert missing.value.hint == "install the package that has my_net_q, or add its folder to PYTHONPATH"
    Path("my_net_q.py").write_text("")
    with pytest.raises(headway.errors.ModelError) as here:
        load_class("my_net_q:Net")
    assert here.value.hint == "my_net_q.py is in this folder: put PYTHONPATH=. before the command"
