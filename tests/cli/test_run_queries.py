"""`headway runs`, `compare` and `metrics` over several runs, as the command line calls them."""

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from headway.agent.remote.store_mirror import RunCopy
from headway.cli import runs as runs_verb
from headway.cli.compare import compare
from headway.cli.main import _wrap
from headway.cli.metrics import metrics
from headway.cli.plot import draw
from headway.errors import RunError, UsageError
from headway.recipe import Data, Recipe
from headway.track import RunFolder, lock_run, run_id, write_json
from headway.track.registry import remove_name, tag
from headway.track.store import read_series
from headway.track.store.comparison import read_outcomes
from track_runs import plain_run

app = typer.Typer()
app.add_typer(runs_verb.app, name="runs")
for verb in (compare, metrics):
    app.command()(verb)


@pytest.fixture(autouse=True)
def _own_index(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path) -> Path:
    """Three runs: b has another learning rate than a, c another seed as well."""
    for number, (name, changes) in enumerate({"a": {}, "b": {"lr": 0.5}, "c": {"lr": 0.5, "seed": 9}}.items()):
        run = plain_run(tmp_path / "runs", [9.0, 4.0 - number, 3.0 - number], name)
        content = Recipe(name="demo", data=Data(path="x")).model_dump(mode="json")
        content["train"]["lr"] = changes.get("lr", content["train"]["lr"])
        content["seed"] = changes.get("seed", content["seed"])
        write_json(run.recipe_file, content)
        os.utime(run.events / "0001-rank-0.jsonl", ns=(number, number))
        os.utime(run.events / "0001-agent.jsonl", ns=(number, number))
    return tmp_path / "runs"


def call(root: Path, verb: str, *words: str, **more) -> Result:
    return CliRunner().invoke(app, [verb, *words, "--runs", str(root)], **more)


def test_runs_shows_the_columns_asked_for(root):
    result = call(root, "runs", "--where", "loss < 3", "--sort", "-loss", "--columns", "loss,min(loss),train.lr,tags")
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[:3] == [
        ["run", "state", "loss", "min(loss)", "train.lr", "tags"],
        ["b", "finished", "2", "2", "0.5", "-"],
        ["c", "finished", "1", "1", "0.5", "-"],
    ]
    document = json.loads(call(root, "runs", "--columns", "max(loss)", "--sort", "name", "--json").output)
    assert [(row["name"], row["values"], row["tags"]) for row in document] == [
        (name, {"max(loss)": 9.0}, []) for name in "abc"
    ]
    assert "no run in" in call(root, "runs", "--where", "loss > 100").output
    assert "train.lr" in call(root, "runs", "--keys").output.splitlines()
    narrow = call(root, "runs", "--columns", "loss,train.lr,note,created", env={"COLUMNS": "60"}).output
    assert max(map(len, narrow.splitlines()[:4])) <= 60


def test_columns_fit_a_narrow_terminal_however_many_and_long(root):
    long = "a" + "-long" * 12
    (root / "a").rename(root / long)
    output = call(root, "runs", "--columns", "loss,train.lr", env={"COLUMNS": "60"}).output
    assert max(map(len, output.splitlines()[:4])) <= 60
    assert long[:12] in output
    many = "loss,train.lr,min(loss),max(loss),mean(loss),created,state,seed"
    lines = call(root, "runs", "--columns", many, "--sort", "-loss", env={"COLUMNS": "60"}).output.splitlines()
    assert max(map(len, lines[:-1])) <= 60
    assert [line.split()[1] for line in lines if line.startswith("  min(loss)")] == ["3", "2", "1"]


def test_archived_runs_are_mentioned_where_no_other_is_left(root):
    call(root, "runs", "archive", "*")
    output = " ".join(call(root, "runs").output.split())
    assert output.startswith(f"all 3 runs in {root} are archived")
    assert "runs --archived" in output
    assert "no run in" in call(root, "runs", "--where", "loss > 100").output
    assert "no runs in" in call(root / "none", "runs").output


def test_sweep_tells_which_key_matters_and_what_nothing_beats(root, tmp_path):
    document = json.loads(call(root, "runs", "importance", "--json").output)
    assert {key["key"]: key["values"] for key in document["keys"]} == {"train.lr": 2, "seed": 2}
    # Losses are 3, 2, 1; a has its own lr, c its own seed: SS between is 1.5 of 2, inside 0.5 with 1 degree of freedom.
    assert [key["share"] for key in document["keys"]] == [pytest.approx((2 - 0.5 - 0.5) / 2)] * 2
    assert {key["key"]: key["best"] for key in document["keys"]} == {"train.lr": 0.5, "seed": 9}
    text = call(root, "runs", "importance", "*", env={"COLUMNS": "60"}).output
    assert max(map(len, text.splitlines()[:-1])) <= 60
    front = json.loads(call(root, "runs", "pareto", "--by", "loss,train.lr", "--json").output)["front"]
    assert [entry["run"] for entry in front] == ["c", "a"], "b has c's lr and a larger loss"
    plot = tmp_path / "front.png"
    assert call(root, "runs", "pareto", "[abc]", "--by", "loss,train.lr", "--plot", str(plot)).exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    for words in (
        ["--by", "loss"],
        ["--by", "loss,nope"],
        ["--plot", "x.gif"],
        ["--plot", str(tmp_path / "no" / "x.png")],
    ):
        assert isinstance(call(root, "runs", "pareto", *words).exception, UsageError), words
    assert isinstance(call(root, "runs", "importance", "a", "b").exception, UsageError), "too few"


def test_mistakes_point_into_the_query(root):
    error = call(root, "runs", "--where", "loss < 3 and trian.lr > 1").exception
    assert isinstance(error, UsageError)
    assert error.message.splitlines()[1:] == ["  loss < 3 and trian.lr > 1", "               ^"]
    assert error.hint == "did you mean train.lr?"
    assert _wrap("error: ", error.message).splitlines()[2] == "               ^"


def test_labels_are_changed_and_shown(root):
    assert call(root, "runs", "tag", "a", "good", "base").output == "a: tags base, good\n"
    assert call(root, "runs", "tag", "a", "good", "--remove").output == "a: tags base\n"
    assert call(root, "runs", "note", "a", "worth a look").output == "a: note written\n"
    document = json.loads(call(root, "runs", "--where", "tags = base", "--json").output)
    assert [(row["name"], row["note"]) for row in document] == [("a", "worth a look")]
    assert "archived" in call(root, "runs", "archive", "a", "b").output
    assert [row["name"] for row in json.loads(call(root, "runs", "--json").output)] == ["c"]
    call(root, "runs", "archive", "--undo", "[ab]")
    assert len(json.loads(call(root, "runs", "--json").output)) == 3
    assert json.loads(call(root, "runs", "rename", "a", "z", "--json").output) == {"run": "z", "before": "a"}


def test_removal_asks_and_refuses_live_runs(root):
    assert isinstance(call(root, "runs", "rm", "a").exception, UsageError), "no terminal to ask on"
    with lock_run(RunFolder(root / "b")):
        result = call(root, "runs", "rm", "b", "--yes")
    assert isinstance(result.exception, RunError)
    assert "cannot remove: run b is in use" in result.exception.message
    assert call(root, "runs", "delete", "a", "c", "--yes").output.startswith("removed 2 runs (a, c), "), "the old name"
    assert sorted(path.name for path in root.iterdir()) == ["b"]


def test_what_changes_runs_takes_whole_names(root):
    (root / "b").rename(root / "best")
    for words in (
        ["rm", "b", "--yes"],
        ["archive", "b"],
        ["rename", "b", "z"],
        ["tag", "b", "x"],
        ["note", "b", "x"],
    ):
        result = call(root, "runs", *words)
        assert isinstance(result.exception, RunError), words
        assert result.exception.hint == "give the whole name: best?"
    assert sorted(path.name for path in root.iterdir()) == ["a", "best", "c"]


def test_run_with_a_named_model_is_not_deleted(root):
    tag(root, "prod", RunFolder(root / "a"), 2, "aa")
    result = call(root, "runs", "rm", "a", "--yes")
    assert isinstance(result.exception, RunError)
    assert result.exception.message == "run a has a named model: prod is a@2"
    assert "model rm prod" in str(result.exception.hint)
    remove_name(root, "prod")
    assert call(root, "runs", "rm", "a", "--yes").output.startswith("removed 1 run (a), ")


def test_compare_names_a_cause_only_if_one_key_differs(root):
    lines = call(root, "compare", "a", "b").output.splitlines()
    assert lines[0].split() == ["differs", "a", "b"]
    assert lines[1].split()[0] == "train.lr"
    assert "loss @3" in lines[2]
    assert "(-1)" in lines[2]
    assert "cause: train.lr (the only difference)" in lines
    document = json.loads(call(root, "compare", "a", "b", "c", "--json").output)
    assert (document["cause"], [item["key"] for item in document["differences"]]) == (None, ["train.lr", "seed"])
    assert document["differences"][1]["values"][:2] == [document["differences"][1]["values"][0]] * 2
    assert document["sentence"].startswith("confounded: 2 keys differ")
    outcomes = {outcome["key"]: (outcome["step"], outcome["values"]) for outcome in document["outcomes"]}
    assert outcomes["loss"] == (3, [3.0, 2.0, 1.0])
    assert outcomes["mfu"][1] == [pytest.approx(100 * 60 / (1500 * 2))] * 3
    (root / "b").rename(root / "best")
    result = call(root, "compare", "a", "be")
    assert result.stderr == "note: be is best\n"
    assert call(root, "compare", "a", "best").stderr == ""
    narrow = call(root, "compare", "*", env={"COLUMNS": "60"}).output.splitlines()
    assert max(map(len, narrow[:-1])) <= 60
    assert isinstance(call(root, "compare", "a").exception, UsageError)
    assert isinstance(call(root, "compare", "a", "b", "--key", "nope").exception, UsageError)


def test_metrics_of_several_runs_are_plotted(root, tmp_path):
    output = call(root, "metrics", "*", "--key", "loss", env={"COLUMNS": "80"}).output
    assert max(map(len, output.splitlines()[:-1])) <= 80
    assert all(f" {mark} {name}  " in output for mark, name in zip("ox+", "abc", strict=True)), "each has its mark"
    assert all(any(mark in line for line in output.splitlines()[2:14]) for mark in "ox+")
    document = json.loads(call(root, "metrics", "a", "b", "--json").output)
    assert [(run["run"], run["mean"]) for run in document["runs"]] == [("a", [9.0, 4.0, 3.0]), ("b", [9.0, 3.0, 2.0])]
    assert call(root, "metrics", "*", "--plot", str(tmp_path / "plot.png")).exit_code == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    for words in (
        ["--plot", "x.gif"],
        ["--plot", str(tmp_path / "no" / "x.png")],
        ["--key", "nope"],
        ["--tensorboard", "tb"],
    ):
        assert isinstance(call(root, "metrics", "*", *words).exception, UsageError)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_spike_reaches_the_top_of_the_plot_and_axes_have_its_range(tmp_path, ascii_only):
    run = plain_run(tmp_path, [2.0] * 500 + [50.0] + [2.0] * 499)
    views = read_series([run], "loss", points=40)
    lines = draw(views, 60, ascii_only=ascii_only)
    assert all(len(line) <= 60 for line in lines)
    assert all(line.isascii() for line in lines) == ascii_only
    assert lines[0].split()[0] == "50"
    body = [line[11:] for line in lines[:-2]]
    marked = [index for index, character in enumerate(body[0]) if character != " "]
    assert marked, "the spike is in the first row"
    assert abs(marked[0] / (60 - 11) - 0.5) < 0.06, "in the middle"
    assert body[-1].strip(), "the rest is in the last row"
    assert lines[-1].split()[:2] == ["step", "1"]
    assert draw(read_series([run], "nope"), 60, ascii_only=ascii_only) == ["nothing to plot: no finite value"]


def test_runs_of_an_object_store_are_synced_into_the_cache(root, tmp_path):
    url = f"file://{tmp_path / 'bucket'}"
    for name in "abc":
        run_id(RunFolder(root / name))
        RunCopy(RunFolder(root / name), f"{url}/{name}").update()
    query = ["--store", url, "--where", "min(loss) < 3", "--sort", "loss", "--json"]
    for _ in range(2):
        document = json.loads(call(root, "runs", *query).stdout)
        assert [(row["name"], row["loss"], row["step"]) for row in document] == [("c", 1.0, 3), ("b", 2.0, 3)]
    (tmp_path / "bucket" / "a" / "folder" / "recipe.json").unlink()
    result = call(root, "runs", "--store", url)
    assert "note: a was not fetched" in result.stderr
    assert isinstance(call(root, "runs", "--store", "bucket/x").exception, UsageError)


def test_code_of_ones_own_is_compared_by_what_it_said(root):
    for name, text in (("a", "x = 1"), ("b", "x = 2"), ("c", "x = 1")):
        (root / name / "code").mkdir()
        (root / name / "code" / "own.py").write_text(text)
    output = call(root, "compare", "a", "b").output
    assert f"code: diff -u {root / 'a' / 'code' / 'own.py'} {root / 'b' / 'code' / 'own.py'}" in output
    assert "confounded: 2 keys differ" in output
    kinds = {item["kind"] for item in json.loads(call(root, "compare", "a", "c", "--json").output)["differences"]}
    assert kinds == {"recipe"}


def test_speed_of_a_run_is_its_tokens_by_its_seconds(root):
    run = RunFolder(root / "d")
    run.events.mkdir(parents=True)
    header = {"kind": "open", "format": 1, "attempt": 1, "process": "rank-0", "wall": 0, "mono": 0, "boot": "b"}
    lines = [{**header, "host": "h", "pid": 1}]
    seconds = [1, 1, 8]
    lines += [{"kind": "step", "t": at, "step": at + 1, "data": 0, "compute": 10**9 * s, "tokens": 100, "loss": 1.0}
              for at, s in enumerate(seconds)]  # fmt: skip
    (run.events / "0001-rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcomes = {outcome.key: outcome.values for outcome in read_outcomes([run, RunFolder(root / "a")])}
    assert outcomes["tokens_per_s"][0] == pytest.approx(300 / 10), "the mean of 100, 100 and 12.5 is 70.8"
    assert outcomes["step_s"][0] == pytest.approx(10 / 3)
