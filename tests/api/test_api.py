"""Headway from Python: what notebooks see equals the record, is escaped, and loads nothing before it is used."""

import html.parser
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.api.run import Metric, Run
from headway.api.start import recipe_of, setting
from headway.errors import RecipeError, RunError, UsageError, WorkerError
from headway.recipe import Recipe, load_recipe
from headway.track import Recorder, RunFolder, lock_run, record_path, write_json

START = """
import sys
import headway as hw
before = set(sys.modules)
assert not {"numpy", "pydantic", "torch"} & before, "importing headway imports little"
hw.log, hw.Image, hw.runs, hw.load, hw.train, hw.plan
assert callable(hw.train) and callable(hw.plan)
import headway.plan.plan, headway.train
assert callable(hw.train) and callable(hw.plan)
from headway.api import train, plan
assert "torch" not in sys.modules
try:
    hw.nothing
except AttributeError as error:
    assert "nothing" in str(error)
"""


def write_run(root: Path, recipe: Recipe, name: str, losses: list[float], outcome: str = "finished") -> RunFolder:
    run = RunFolder(root / name)
    run.events.mkdir(parents=True)
    write_json(run.recipe_file, recipe.model_dump())
    with Recorder(record_path(run.events, 1, "agent"), attempt=1, process="agent") as agent:
        agent.event("attempt", workers=1, device="cpu", from_step=0)
        with Recorder(record_path(run.events, 1, "rank-0"), attempt=1, process="rank-0") as leader:
            for step, loss in enumerate(losses, 1):
                leader.event("step", step=step, data=1000, compute=2000, loss=loss, tokens=10)
        agent.event("end", outcome=outcome, reason="it <b>ended</b>")
    return run


class Balanced(html.parser.HTMLParser):
    """Fails for a tag that is not closed, and collects text and tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.text = list[str](), set[str](), ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag != "polyline":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == "polyline" or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_importing_headway_loads_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_metrics_and_report_are_those_of_the_record(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    run = Run(write_run(tmp_path, recipe(), "demo-1", [3.0, 2.5, 2.0]).path)
    steps, values = run.metrics("loss")
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [3.0, 2.5, 2.0])
    assert np.asarray(run.metrics("loss")).tolist() == [3.0, 2.5, 2.0]
    assert len(run.metrics("loss")) == 3
    report = run.report()
    assert sum(report.seconds.values()) == pytest.approx(report.total_s)
    assert (run.state, run.summary.step, run.wait().name) == ("finished", 3, "demo-1")
    with pytest.raises(UsageError, match="no metric 'los'"):
        run.metrics("los")


def test_runs_are_chosen_by_a_query(
    tmp_path: Path, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    for name, loss in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        write_run(tmp_path / "runs", recipe(), name, [loss])
    chosen = hw.runs("loss < 2.5", sort="loss", runs=tmp_path / "runs")
    assert [run.name for run in chosen] == ["b", "c"]
    assert [run.name for run in chosen[1:]] == ["c"]
    assert len(hw.runs(runs=tmp_path / "runs")) == 3


def test_html_is_escaped_and_well_formed(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    bad = "<script>alert(1)</script>\"'&\x1b[31m"
    run = Run(write_run(tmp_path, recipe(), "x<img src=y>", [float("nan"), 1.0]).path)
    metric = Metric(bad, bad, np.arange(5), np.array([1.0, np.nan, np.inf, 2.0, 1e300]))
    empty = Metric(bad, bad, np.arange(0), np.array([]))
    for shown in (metric, empty, run, run.report(), hw.runs(runs=tmp_path)):
        parsed = Balanced(shown._repr_html_())
        assert not parsed.tags & {"script", "img", "b"}
    assert "<script>alert(1)</script>" in Balanced(metric._repr_html_()).text


def test_wait_raises_for_a_failed_run_and_after_a_time(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    failed = write_run(tmp_path, recipe(), "failed", [1.0], outcome="failed")
    with pytest.raises(WorkerError, match="it <b>ended</b>"):
        Run(failed.path).wait()
    with lock_run(failed), pytest.raises(TimeoutError, match="still runs after 0 s"):
        Run(failed.path).wait(timeout_s=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.lr", 3e-4), ("train.steps", 7), ("name", 'a"b'[:1]), ("train.clip", 0.0), ("train.deterministic", True),
        ("train.batch_ramp", [[3, 16]]), ("eval.tasks_data", None), ("rl", None),
        ("callbacks", [{"class": "a:B", "args": {"x": "'\"\\\n", "y": [1, 2.5, True]}}]),
    ],
)  # fmt: skip
def test_settings_mean_what_they_are(recipe: Callable[..., Recipe], key: str, value: Any) -> None:
    made: Any = recipe_of(recipe(), {key: value}).model_dump(mode="json")
    for part in key.split("."):
        made = made[part]
    assert made == value


def test_recipe_from_file_dicts_and_object_is_the_same(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[data]\npath = "x"\n[train]\nsteps = 5\n')
    values = {"data": {"path": "x"}, "train": {"steps": 5}}
    expected = load_recipe(file, ["train.lr=0.5"])
    assert recipe_of(file, {"train.lr": 0.5}) == recipe_of(str(file), {"train.lr": 0.5}) == expected
    assert recipe_of(values, {"train.lr": 0.5}) == recipe_of(load_recipe(file), {"train.lr": 0.5}) == expected
    for wrong in (3, ["x"]):
        with pytest.raises(RecipeError, match="is no recipe"):
            recipe_of(wrong)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="cannot be a object"):
        setting("x", object())


def test_plan_is_that_of_the_planner() -> None:
    planned = hw.plan("recipes/llama3-8b.toml", on="h100x8x2", price=2.0)
    assert planned.step_s == planned.plan.best.estimate.step.seconds
    assert sum(planned.accounts.values()) == pytest.approx(planned.step_s, rel=1e-6)
    assert "llama3-8b on h100x8x2" in repr(planned)
    Balanced(planned._repr_html_())


@pytest.mark.slow
def test_train_wait_and_load(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    run = hw.train(recipe(), set={"train.steps": 3, "train.device": "cpu"}, workers=1, runs=tmp_path)
    assert run.wait(300).state == "finished"
    assert run.metrics("loss").steps.tolist() == [1, 2, 3]
    assert hw.load(run).generate(["x"])[0].outputs
    with pytest.raises(RunError, match="already exists"):
        hw.train(recipe(), name=run.name, runs=tmp_path)
