"""Sweeps whose runs go by their object stores: what is sent, what is left when something breaks half way, what is
brought here. The engine only writes down what it is asked for; the store is a folder."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.agent.remote.store_mirror import StoreMirror, fetch_run
from headway.cluster.engines.engine import Engine, JobStatus, LaunchRequest, Machine
from headway.cluster.engines.submissions import last_submission
from headway.cluster.submit import runs as submit
from headway.cluster.submit import store_runs as stored
from headway.cluster.submit import sweep_sync as brought
from headway.cluster.submit import sweeps
from headway.cluster.submit.grid import parse_grid
from headway.cluster.submit.store_runs import delete_run, each, run_of_copy, upload_run
from headway.cluster.submit.sweep_results import sweep_results
from headway.cluster.submit.sweep_sync import SweepSync
from headway.cluster.submit.sweeps import (
    SweepRequest,
    describe_sweep,
    find_sweep,
    is_sweep,
    request_sweep,
    requeue_sweep,
    start_sweep,
)
from headway.errors import EngineError, RunError, StateError, UsageError
from headway.recipe import Recipe, to_toml
from headway.state.object_store import open_store
from headway.track import RunFolder, list_runs, run_id

sys.path.append(str(Path(__file__).parents[2] / "state"))

from s3 import FORBIDDEN

pytest_plugins = ["s3"]

GRID = ("train.lr=1e-2,2e-2",)


class Asked(Engine):
    """Starts nothing."""

    name = "local"

    def __init__(self) -> None:
        self.launched, self.cancelled, self.trouble = list[LaunchRequest](), list[str](), ""
        self.states = dict[str, JobStatus]()

    def inventory(self) -> list[Machine]:
        return []

    def describe(self, request: LaunchRequest) -> str:
        return " ".join(request.command)

    def launch(self, request: LaunchRequest) -> str:
        if self.trouble:
            raise EngineError(self.trouble)
        self.launched.append(request)
        return f"ab{len(self.launched)}"

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        return {job: self.states.get(job, JobStatus("waiting")) for job in jobs}

    def signal(self, job: str, number: signal.Signals) -> None:
        raise AssertionError

    def logs(self, job: str) -> list[Path]:
        return []

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)


class Desk:
    """A recipe with a store, and an engine that is asked for its sweeps."""

    def __init__(self, folder: Path, recipe: Callable[..., Recipe], engine: Asked) -> None:
        self.folder, self.runs, self.store, self.engine = folder, folder / "runs", folder / "store", engine
        self.store.mkdir()
        self.url = f"file://{self.store}"
        self.recipe = recipe
        self.write({"checkpoint.store": {"url": self.url, "every_steps": 2}})

    def write(self, settings: dict) -> None:
        (self.folder / "r.toml").write_text(to_toml(self.recipe({"name": "tiny", "train.steps": 4} | settings)))

    def wanted(self, *grid: str, shared: bool = False, settings: Sequence[str] = ()) -> SweepRequest:
        axes = parse_grid(list(grid or GRID), settings)
        return request_sweep(self.folder / "r.toml", settings, axes, engine="local", name="s", shared=shared)

    def in_store(self) -> list[str]:
        return sorted(str(path.relative_to(self.store)) for path in self.store.rglob("*") if path.is_file())

    def here(self) -> list[str]:
        folders = (self.runs / ".sweeps").glob("*/")
        return sorted([*(run.name for run in list_runs(self.runs)), *(f".sweeps/{path.name}" for path in folders)])


@pytest.fixture
def desk(tmp_path: Path, recipe, monkeypatch: pytest.MonkeyPatch) -> Desk:
    engine = Asked()
    (tmp_path / "engines.toml").write_text("")
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    for module in (sweeps, submit):
        monkeypatch.setattr(module, "open_engine", lambda *_: engine)
    return Desk(tmp_path, recipe, engine)


def test_each_copy_finds_its_own_run(desk: Desk, monkeypatch) -> None:
    sweep, new = start_sweep(desk.wanted(), desk.runs)
    assert new
    (request,) = desk.engine.launched
    assert request.array == 2
    place = request.command[request.command.index("--run") + 1]
    assert not any(str(desk.runs) in word for word in request.command)
    for index, run in enumerate(("s-lr_1e-2", "s-lr_2e-2")):
        monkeypatch.setenv("HEADWAY_ARRAY_INDEX", str(index))
        assert run_of_copy(place) == f"{desk.url}/{run}"
        there = fetch_run(run_of_copy(place), desk.folder / "machine")  # all that an agent needs is there
        assert run_id(there) == run_id(RunFolder(desk.runs / run))
        assert json.loads(there.recipe_file.read_bytes())["train"]["lr"] == [1e-2, 2e-2][index]
    monkeypatch.setenv("HEADWAY_ARRAY_INDEX", "2")
    with pytest.raises(RunError, match="knows of no run 2"):
        run_of_copy(place)
    monkeypatch.delenv("HEADWAY_ARRAY_INDEX")
    with pytest.raises(UsageError, match="does not say which of its runs"):
        run_of_copy(place)
    assert run_of_copy(f"{desk.url}/s-lr_1e-2") == f"{desk.url}/s-lr_1e-2"
    assert start_sweep(desk.wanted(), desk.runs) == (sweep, False)
    assert len(desk.engine.launched) == 1
    with pytest.raises(RunError, match="of other settings"):
        start_sweep(desk.wanted(shared=True), desk.runs)


@pytest.mark.parametrize("shared", [False, True])
def test_what_has_not_finished_is_started_again_each_by_itself(desk: Desk, shared: bool) -> None:
    sweep, _ = start_sweep(desk.wanted("train.lr=1e-2,2e-2,3e-2,4e-2", shared=shared), desk.runs)
    first, second, third, fourth = (point.run for point in sweep.points)
    desk.engine.states = {
        "ab1_0": JobStatus("finished"),
        "ab1_1": JobStatus("failed"),
        "ab1_2": JobStatus("cancelled"),
        "ab1_3": JobStatus("running"),
    }
    after = requeue_sweep(desk.runs, sweep, ("bad-node",))
    assert {run: one.submission.job for run, one in after.items()} == {
        first: "ab1_0",
        second: "ab2",
        third: "ab3",
        fourth: "ab1_3",
    }
    for run, request in zip((second, third), desk.engine.launched[1:], strict=True):
        assert (request.array, request.avoid) == (None, ("bad-node",))
        named = request.command[request.command.index("--run") + 1]
        assert named == (run if shared else f"{desk.url}/{run}")
    with pytest.raises(RunError, match="no run of sweep s has failed or was cancelled"):
        requeue_sweep(desk.runs, sweep)


def test_a_sweep_that_is_not_whole_trains_nothing(desk: Desk, monkeypatch) -> None:
    monkeypatch.setattr(stored, "PATIENCE_S", 0.0)
    monkeypatch.setenv("HEADWAY_ARRAY_INDEX", "0")
    with pytest.raises(RunError, match="never submitted whole: nothing is trained"):
        run_of_copy(f"{desk.url}/.sweeps/s-0123abcd")


def test_what_would_be_sent_leaves_nothing(desk: Desk) -> None:
    told = describe_sweep(desk.wanted(), desk.runs)
    assert f"agent --run {desk.url}/.sweeps/s-" in told
    assert (desk.here(), desk.in_store()) == ([], [])


def test_without_a_store_it_is_refused(desk: Desk) -> None:
    desk.write({})
    with pytest.raises(RunError, match="run s-lr_1e-2 needs an object store") as refused:
        desk.wanted()
    assert "[checkpoint.store]" in str(refused.value.hint)
    desk.wanted(shared=True)


def test_runs_that_are_started_in_different_ways_are_refused(desk: Desk, dataset: Path) -> None:
    (desk.folder / "engines.toml").write_text('[local]\nshared = false\ncontainer = "docker://image"\n')
    shutil.copytree(dataset, desk.folder / "other")
    with pytest.raises(UsageError, match="not started in the same way"):
        start_sweep(desk.wanted(f"data.path={dataset},{desk.folder}/other", shared=True), desk.runs)
    assert (desk.here(), desk.in_store()) == ([], [])


# -- half way


@pytest.mark.slow
def test_on_s3_it_is_the_same(desk: Desk, bucket: str, proxy, monkeypatch) -> None:
    desk.write({"checkpoint.store": {"url": bucket, "every_steps": 2}})
    store = open_store(bucket)
    # the second run cannot be put; all is taken back
    proxy.harm = lambda asked: FORBIDDEN if asked.method == "PUT" and "2e-2/folder/recipe" in asked.path else None
    with pytest.raises(StateError, match=r"s-lr_2e-2/folder/recipe.json could not be written"):
        start_sweep(desk.wanted(), desk.runs)
    assert (desk.here(), store.list()) == ([], [])
    # nothing can be taken back; the next one does it
    proxy.harm = lambda asked: FORBIDDEN if asked.method in ("POST", "DELETE") else None
    desk.engine.trouble = "no room"
    with pytest.raises(StateError, match=r"no room; .* could not be removed"):
        start_sweep(desk.wanted(), desk.runs)
    assert list_runs(desk.runs) == []
    assert len(store.list()) > 2
    proxy.harm = lambda _: None
    desk.engine.trouble = ""
    start_sweep(desk.wanted(), desk.runs)
    command = desk.engine.launched[0].command
    monkeypatch.setenv("HEADWAY_ARRAY_INDEX", "1")
    assert run_of_copy(command[command.index("--run") + 1]) == f"{bucket}/s-lr_2e-2"
    assert fetch_run(f"{bucket}/s-lr_2e-2", desk.folder / "machine").recipe_file.exists()
    assert desk.here() == [".sweeps/s", "s-lr_1e-2", "s-lr_2e-2"]


def test_a_bucket_that_is_not_there_is_told_of_before_anything_is_put(desk: Desk, bucket: str) -> None:
    assert bucket.startswith("s3://bucket-")
    desk.write({"checkpoint.store": {"url": "s3://no-such-bucket/prefix", "every_steps": 2}})
    with pytest.raises(StateError, match=r"s3://no-such-bucket/prefix/s-lr_.* could not be read"):
        start_sweep(desk.wanted(), desk.runs)
    assert desk.here() == []


def of_another(desk: Desk) -> None:
    (desk.store / "s-lr_2e-2").mkdir()
    (desk.store / "s-lr_2e-2" / "run").write_text("another")


def test_a_place_that_is_taken(desk: Desk) -> None:
    of_another(desk)
    with pytest.raises(RunError, match="s-lr_2e-2 has checkpoints of another run of this name"):
        start_sweep(desk.wanted(), desk.runs)
    assert (desk.here(), desk.in_store(), desk.engine.launched) == ([], ["s-lr_2e-2/run"], [])


def test_an_engine_that_fails(desk: Desk) -> None:
    desk.engine.trouble = "no room for anything"
    with pytest.raises(EngineError, match="no room"):
        start_sweep(desk.wanted(), desk.runs)
    assert (desk.here(), desk.in_store()) == ([], [])


@pytest.mark.parametrize("where", ["note_submission", "commit"])
@pytest.mark.parametrize("error", [StateError("the store is gone"), KeyboardInterrupt()])
def test_whatever_fails_after_the_engine_has_it(desk: Desk, monkeypatch, where: str, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sweeps, where, fail)
    with pytest.raises(type(error)):
        start_sweep(desk.wanted(), desk.runs)
    assert (desk.here(), desk.in_store()) == ([], [])
    assert desk.engine.cancelled == ["ab1"]


def test_a_store_that_keeps_what_was_put_is_tidied_up_by_the_next(desk: Desk, monkeypatch) -> None:
    def gone(*_: object) -> None:
        raise StateError("no connection could be made")

    desk.engine.trouble = "no room"
    with monkeypatch.context() as broken:
        broken.setattr(stored, "take_run", gone)
        with pytest.raises(StateError, match="no room; 2 runs are left in their stores: no connection") as told:
            start_sweep(desk.wanted(), desk.runs)
    assert told.value.hint == "the next headway sweep takes them away"
    assert list_runs(desk.runs) == []
    assert "s-lr_1e-2/run" in desk.in_store()
    desk.engine.trouble = ""
    describe_sweep(desk.wanted(), desk.runs)
    assert (desk.here(), desk.in_store()) == ([], [])


def test_a_run_is_taken_only_from_its_own_place(desk: Desk) -> None:
    start_sweep(desk.wanted(), desk.runs)
    before = desk.in_store()
    delete_run(f"{desk.url}/s-lr_1e-2", "another")
    assert desk.in_store() == before
    delete_run(f"{desk.url}/s-lr_1e-2", run_id(RunFolder(desk.runs / "s-lr_1e-2")))
    assert desk.in_store() == [name for name in before if not name.startswith("s-lr_1e-2/")]
    upload_run(RunFolder(desk.runs / "s-lr_1e-2"))
    assert desk.in_store() == before


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.append({tests!r})
import test_sweep_stored as here
from headway.cluster import stored, submit, sweeps
engine = here.Asked()
sweeps.open_engine = submit.open_engine = lambda *_: engine
def dies(real, when=lambda *_: True):
    return lambda *words: os.kill(os.getpid(), signal.SIGKILL) if when(*words) else real(*words)
{dies}
axes = here.parse_grid(list(here.GRID), [])
sweeps.start_sweep(sweeps.wanted_sweep(Path("r.toml"), [], axes, engine="local", name="s", shared=False), Path("runs"))
"""


def killed_at(desk: Desk, dies: str) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent), dies=dies)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], cwd=desk.folder, env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_a_maker_that_dies_leaves_nothing_that_trains(desk: Desk, monkeypatch) -> None:
    killed_at(desk, "sweeps.commit = dies(sweeps.commit)")
    assert "s-lr_2e-2/folder/recipe.json" in desk.in_store()
    assert not any(name.startswith(".sweeps/") for name in desk.in_store())  # so its copies train nothing
    # its store does not answer: nobody knows whether it is whole
    with monkeypatch.context() as broken:
        broken.setattr(stored, "_parts", lambda place: (f"{desk.url}/r.toml", place))
        (desk.store / "r.toml").write_text("no folder")
        with pytest.raises(RunError, match="a sweep s was left half made, and its object store does not answer"):
            start_sweep(desk.wanted(), desk.runs)
    (desk.store / "r.toml").unlink()
    ids = {run_id(run) for run in list_runs(desk.runs)}
    _, new = start_sweep(desk.wanted(), desk.runs)
    assert new
    assert not ids & {run_id(run) for run in list_runs(desk.runs)}
    assert desk.here() == [".sweeps/s", "s-lr_1e-2", "s-lr_2e-2"]


def test_a_maker_that_dies_after_the_store_knows_has_made_a_sweep(desk: Desk) -> None:
    killed_at(desk, "Path.replace = dies(Path.replace, lambda path, _: path.name == 'ready.json')")
    assert not is_sweep(desk.runs, "s")
    sweep, new = start_sweep(desk.wanted(), desk.runs)
    assert (new, sweep.job, desk.engine.launched) == (False, "ab1", [])


# -- what comes of it


def train_elsewhere(desk: Desk, run: str, *losses: float) -> None:
    """As if a machine had recorded that, and put it into the store."""
    there = fetch_run(f"{desk.url}/{run}", desk.folder / "machine")
    with (there.events / "0001-rank-0.jsonl").open("a") as file:
        file.writelines(json.dumps({"loss": loss}) + "\n" for loss in losses)
    StoreMirror(there, f"{desk.url}/{run}", 1, lambda: True).close()


def recorded(desk: Desk, run: str) -> list[float]:
    path = desk.runs / run / "events" / "0001-rank-0.jsonl"
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []


def test_only_what_may_be_new_is_brought(desk: Desk, monkeypatch) -> None:
    sweep, _ = start_sweep(desk.wanted("seed=1,2,3,4"), desk.runs)
    asked, real = list[str](), fetch_run
    monkeypatch.setattr(
        "headway.agent.remote.store_mirror.fetch_run", lambda url, *more: asked.append(url[-1]) or real(url, *more)
    )
    told_state = {"s-seed_2": "finished", "s-seed_3": "failed"}
    monkeypatch.setattr(brought, "summarize", lambda run: SimpleNamespace(state=told_state[run.name]))
    for seed in "123":
        train_elsewhere(desk, f"s-seed_{seed}", 3.0, float(seed))
    states = {
        "1": JobStatus("running", starts=1),
        "2": JobStatus("finished", starts=1),
        "3": JobStatus("failed", starts=1),
    }
    desk.engine.states = {f"ab1_{int(seed) - 1}": status for seed, status in states.items()}
    records = SweepSync(desk.runs, sweep)
    records.sync(told := sweeps.sweep_standings(desk.runs, sweep))
    assert sorted(asked) == ["1", "2", "3"]  # the fourth has not begun
    assert [recorded(desk, f"s-seed_{seed}") for seed in "1234"] == [[3.0, 1.0], [3.0, 2.0], [3.0, 3.0], []]
    asked.clear()
    records.sync(told)  # a moment ago
    assert asked == []
    records.sync(told, now=True)  # those that are over were over before they were brought
    assert asked == ["1"]
    SweepSync(desk.runs, sweep).sync(told)  # who comes later knows of those that finished
    assert sorted(asked[1:]) == ["1", "3"]
    assert records.trouble == ""


def test_a_store_that_does_not_answer_is_left_alone_soon(desk: Desk, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "x",
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(brought, "PATIENCE_S", 0.1)
    seeds = ",".join(map(str, range(20)))
    sweep, _ = start_sweep(desk.wanted(f"seed={seeds}"), desk.runs)
    points = tuple(sweeps.SweepRun(one.run, one.settings, f"s3://bucket/{one.run}") for one in sweep.points)
    there = sweeps.replace(sweep, points=points)
    desk.engine.states = {f"ab1_{index}": JobStatus("running", starts=1) for index in range(20)}
    asked, real = list[str](), fetch_run
    monkeypatch.setattr(
        "headway.agent.remote.store_mirror.fetch_run", lambda url, *more: asked.append(url) or real(url, *more)
    )
    records = SweepSync(desk.runs, there)
    rows = sweep_results(desk.runs, there, records)
    assert [row.state for row in rows] == ["running"] * 20
    assert records.trouble.startswith("20 of 20 runs could not be brought from their stores: s3://bucket/s-seed_")
    assert "no connection could be made" in records.trouble
    assert stored.IN_FLIGHT <= len(asked) < 20


def test_of_many_that_fail_one_by_one_all_are_tried() -> None:
    def act(name: str) -> None:
        if int(name) % 2:
            raise StateError(name)

    heard = list[tuple[int, int]]()
    went, wrong = each(act, map(str, range(40)), lambda done, of: heard.append((done, of)))
    assert went == {str(number) for number in range(0, 40, 2)}
    assert {name: error.message for name, error in wrong.items()} == {str(n): str(n) for n in range(1, 40, 2)}
    assert heard[-1] == (20, 40)


def test_a_run_that_is_over_is_requeued_by_its_own_address(desk: Desk) -> None:
    sweep, _ = start_sweep(desk.wanted(), desk.runs)
    desk.engine.states = {"ab1_1": JobStatus("failed", starts=1)}
    run = RunFolder(desk.runs / "s-lr_2e-2")
    submit.requeue(desk.runs, run)
    again = desk.engine.launched[-1]
    assert again.array is None
    assert again.command[again.command.index("--run") + 1] == f"{desk.url}/s-lr_2e-2"
    known = last_submission(run.path)
    assert known is not None
    assert known.job == "ab2"
    sweeps.cancel_sweep(desk.runs, find_sweep(desk.runs, "s"))
    assert desk.engine.cancelled == [sweep.job, "ab2"]
