"""Sweeps whose runs travel through object stores: what is submitted, what is left after a failure half way, what is
fetched. The engine only records requests; the store is a folder."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.agent.remote.store_mirror import StoreMirror, fetch_run
from headway.cluster.engines import settings as engine_settings
from headway.cluster.engines.engine import Engine, JobStatus, LaunchRequest, Machine
from headway.cluster.engines.submissions import last_submission
from headway.cluster.submit import runs as submit
from headway.cluster.submit import store_runs, sweep_start, sweep_sync
from headway.cluster.submit.grid import parse_grid
from headway.cluster.submit.store_runs import delete_run, for_each, run_of_array_task, upload_run
from headway.cluster.submit.sweep_request import SweepRequest, request_sweep
from headway.cluster.submit.sweep_results import sweep_results
from headway.cluster.submit.sweep_start import describe_sweep, start_sweep
from headway.cluster.submit.sweep_sync import SweepSync
from headway.cluster.submit.sweeps import (
    SweepRun,
    cancel_sweep,
    find_sweep,
    is_sweep,
    requeue_sweep,
    submitted_sweep_runs,
)
from headway.errors import EngineError, RunError, StateError, UsageError
from headway.recipe import Recipe, to_toml
from headway.state.object_store import open_store
from headway.track import RunFolder, list_runs, run_id

sys.path.append(str(Path(__file__).parents[2] / "state"))

from s3 import FORBIDDEN

pytest_plugins = ["s3"]

GRID = ("train.lr=1e-2,2e-2",)


class RecordingEngine(Engine):
    """Records requests, and starts nothing."""

    name = "local"

    def __init__(self) -> None:
        self.launched, self.cancelled, self.trouble = list[LaunchRequest](), list[str](), ""
        self.states = dict[str, JobStatus]()

    def probe(self) -> None:
        pass

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

    def release(self, job: str) -> bool:
        return False

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)


class SweepSetup:
    """A recipe with a store, and an engine that records its sweeps."""

    def __init__(self, folder: Path, recipe: Callable[..., Recipe], engine: RecordingEngine) -> None:
        self.folder, self.runs, self.store, self.engine = folder, folder / "runs", folder / "store", engine
        self.store.mkdir()
        self.url = f"file://{self.store}"
        self.recipe = recipe
        self.write({"checkpoint.store": {"url": self.url, "every_steps": 2}})

    def write(self, settings: dict) -> None:
        (self.folder / "r.toml").write_text(to_toml(self.recipe({"name": "tiny", "train.steps": 4} | settings)))

    def request(self, *grid: str, shared: bool = False, settings: Sequence[str] = ()) -> SweepRequest:
        axes = parse_grid(list(grid or GRID), settings)
        return request_sweep(self.folder / "r.toml", settings, axes, engine="local", name="s", shared=shared)

    def in_store(self) -> list[str]:
        return sorted(str(path.relative_to(self.store)) for path in self.store.rglob("*") if path.is_file())

    def local(self) -> list[str]:
        folders = (self.runs / ".sweeps").glob("*/")
        return sorted([*(run.name for run in list_runs(self.runs)), *(f".sweeps/{path.name}" for path in folders)])


@pytest.fixture
def setup(tmp_path: Path, recipe, monkeypatch: pytest.MonkeyPatch) -> SweepSetup:
    engine = RecordingEngine()
    (tmp_path / "engines.toml").write_text("")
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    for module in (engine_settings, submit):
        monkeypatch.setattr(module, "open_engine", lambda *_: engine)
    return SweepSetup(tmp_path, recipe, engine)


def test_each_array_task_finds_its_run(setup: SweepSetup, monkeypatch) -> None:
    sweep, new = start_sweep(setup.request(), setup.runs)
    assert new
    (request,) = setup.engine.launched
    assert request.array == 2
    address = request.command[request.command.index("--run") + 1]
    assert not any(str(setup.runs) in argument for argument in request.command)
    for index, run in enumerate(("s-lr_1e-2", "s-lr_2e-2")):
        monkeypatch.setenv("HEADWAY_ARRAY_INDEX", str(index))
        assert run_of_array_task(address) == f"{setup.url}/{run}"
        fetched = fetch_run(run_of_array_task(address), setup.folder / "machine")  # complete for an agent
        assert run_id(fetched) == run_id(RunFolder(setup.runs / run))
        assert json.loads(fetched.recipe_file.read_bytes())["train"]["lr"] == [1e-2, 2e-2][index]
    monkeypatch.setenv("HEADWAY_ARRAY_INDEX", "2")
    with pytest.raises(RunError, match="has no run 2"):
        run_of_array_task(address)
    monkeypatch.delenv("HEADWAY_ARRAY_INDEX")
    with pytest.raises(UsageError, match="does not say which of its runs to train"):
        run_of_array_task(address)
    assert run_of_array_task(f"{setup.url}/s-lr_1e-2") == f"{setup.url}/s-lr_1e-2"
    assert start_sweep(setup.request(), setup.runs) == (sweep, False)
    assert len(setup.engine.launched) == 1
    with pytest.raises(RunError, match="with other settings"):
        start_sweep(setup.request(shared=True), setup.runs)


@pytest.mark.parametrize("shared", [False, True])
def test_requeue_restarts_unfinished_runs_as_single_jobs(setup: SweepSetup, shared: bool) -> None:
    sweep, _ = start_sweep(setup.request("train.lr=1e-2,2e-2,3e-2,4e-2", shared=shared), setup.runs)
    first, second, third, fourth = (point.run for point in sweep.points)
    setup.engine.states = {
        "ab1_0": JobStatus("finished"),
        "ab1_1": JobStatus("failed"),
        "ab1_2": JobStatus("cancelled"),
        "ab1_3": JobStatus("running"),
    }
    after = requeue_sweep(setup.runs, sweep, ("bad-node",))
    assert {run: submitted.submission.job for run, submitted in after.items()} == {
        first: "ab1_0",
        second: "ab2",
        third: "ab3",
        fourth: "ab1_3",
    }
    for run, request in zip((second, third), setup.engine.launched[1:], strict=True):
        assert (request.array, request.avoid) == (None, ("bad-node",))
        target = request.command[request.command.index("--run") + 1]
        assert target == (run if shared else f"{setup.url}/{run}")
    with pytest.raises(RunError, match="no run of sweep s failed or was cancelled"):
        requeue_sweep(setup.runs, sweep)


def test_uncommitted_sweep_trains_nothing(setup: SweepSetup, monkeypatch) -> None:
    monkeypatch.setattr(store_runs, "PATIENCE_S", 0.0)
    monkeypatch.setenv("HEADWAY_ARRAY_INDEX", "0")
    with pytest.raises(RunError, match="was never committed: nothing to train"):
        run_of_array_task(f"{setup.url}/.sweeps/s-0123abcd")


def test_describe_leaves_nothing(setup: SweepSetup) -> None:
    text = describe_sweep(setup.request(), setup.runs)
    assert f"agent --run {setup.url}/.sweeps/s-" in text
    assert (setup.local(), setup.in_store()) == ([], [])


def test_sweep_without_a_store_is_refused(setup: SweepSetup) -> None:
    setup.write({})
    with pytest.raises(RunError, match="run s-lr_1e-2 needs an object store") as refused:
        setup.request()
    assert "[checkpoint.store]" in str(refused.value.hint)
    setup.request(shared=True)


def test_runs_with_different_commands_are_refused(setup: SweepSetup, dataset: Path) -> None:
    (setup.folder / "engines.toml").write_text('[local]\nshared = false\ncontainer = "docker://image"\n')
    shutil.copytree(dataset, setup.folder / "other")
    with pytest.raises(UsageError, match="need different commands"):
        start_sweep(setup.request(f"data.path={dataset},{setup.folder}/other", shared=True), setup.runs)
    assert (setup.local(), setup.in_store()) == ([], [])


# -- failures half way


@pytest.mark.slow
def test_sweep_through_s3(setup: SweepSetup, bucket: str, proxy, monkeypatch) -> None:
    setup.write({"checkpoint.store": {"url": bucket, "every_steps": 2}})
    store = open_store(bucket)
    # the second run cannot be uploaded: everything is deleted
    proxy.harm = lambda sent: FORBIDDEN if sent.method == "PUT" and "2e-2/folder/recipe" in sent.path else None
    with pytest.raises(StateError, match=r"s-lr_2e-2/folder/recipe.json could not be written"):
        start_sweep(setup.request(), setup.runs)
    assert (setup.local(), store.list()) == ([], [])
    # nothing can be deleted: the next sweep does it
    proxy.harm = lambda sent: FORBIDDEN if sent.method in ("POST", "DELETE") else None
    setup.engine.trouble = "no room"
    with pytest.raises(StateError, match=r"no room; .* could not be removed"):
        start_sweep(setup.request(), setup.runs)
    assert list_runs(setup.runs) == []
    assert len(store.list()) > 2
    proxy.harm = lambda _: None
    setup.engine.trouble = ""
    start_sweep(setup.request(), setup.runs)
    command = setup.engine.launched[0].command
    monkeypatch.setenv("HEADWAY_ARRAY_INDEX", "1")
    assert run_of_array_task(command[command.index("--run") + 1]) == f"{bucket}/s-lr_2e-2"
    assert fetch_run(f"{bucket}/s-lr_2e-2", setup.folder / "machine").recipe_file.exists()
    assert setup.local() == [".sweeps/s", "s-lr_1e-2", "s-lr_2e-2"]


def test_missing_bucket_is_reported_before_anything_is_uploaded(setup: SweepSetup, bucket: str) -> None:
    assert bucket.startswith("s3://bucket-")
    setup.write({"checkpoint.store": {"url": "s3://no-such-bucket/prefix", "every_steps": 2}})
    with pytest.raises(StateError, match=r"s3://no-such-bucket/prefix/.* could not be listed: .*NoSuchBucket"):
        start_sweep(setup.request(), setup.runs)
    assert setup.local() == []


def occupy_address(setup: SweepSetup) -> None:
    (setup.store / "s-lr_2e-2").mkdir()
    (setup.store / "s-lr_2e-2" / "run").write_text("another")


def test_address_of_another_run_is_refused(setup: SweepSetup) -> None:
    occupy_address(setup)
    with pytest.raises(RunError, match="s-lr_2e-2 has checkpoints of another run of this name"):
        start_sweep(setup.request(), setup.runs)
    assert (setup.local(), setup.in_store(), setup.engine.launched) == ([], ["s-lr_2e-2/run"], [])


def test_failing_engine_leaves_nothing(setup: SweepSetup) -> None:
    setup.engine.trouble = "no room for anything"
    with pytest.raises(EngineError, match="no room"):
        start_sweep(setup.request(), setup.runs)
    assert (setup.local(), setup.in_store()) == ([], [])


@pytest.mark.parametrize("where", ["note_submission", "commit"])
@pytest.mark.parametrize("error", [StateError("the store is gone"), KeyboardInterrupt()])
def test_failure_after_launch_cancels_the_job_and_leaves_nothing(
    setup: SweepSetup, monkeypatch, where: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sweep_start, where, fail)
    with pytest.raises(type(error)):
        start_sweep(setup.request(), setup.runs)
    assert (setup.local(), setup.in_store()) == ([], [])
    assert setup.engine.cancelled == ["ab1"]


def test_next_sweep_deletes_what_was_left_in_a_store(setup: SweepSetup, monkeypatch) -> None:
    def unreachable(*_: object) -> None:
        raise StateError("cannot connect")

    setup.engine.trouble = "no room"
    with monkeypatch.context() as broken:
        broken.setattr(store_runs, "delete_run", unreachable)
        with pytest.raises(StateError, match="no room; 2 runs left in their stores: cannot connect") as raised:
            start_sweep(setup.request(), setup.runs)
    assert raised.value.hint == "the next headway sweep deletes them"
    assert list_runs(setup.runs) == []
    assert "s-lr_1e-2/run" in setup.in_store()
    setup.engine.trouble = ""
    describe_sweep(setup.request(), setup.runs)
    assert (setup.local(), setup.in_store()) == ([], [])


def test_run_is_deleted_only_at_its_own_address(setup: SweepSetup) -> None:
    start_sweep(setup.request(), setup.runs)
    before = setup.in_store()
    delete_run(f"{setup.url}/s-lr_1e-2", "another")
    assert setup.in_store() == before
    delete_run(f"{setup.url}/s-lr_1e-2", run_id(RunFolder(setup.runs / "s-lr_1e-2")))
    assert setup.in_store() == [name for name in before if not name.startswith("s-lr_1e-2/")]
    upload_run(RunFolder(setup.runs / "s-lr_1e-2"))
    assert setup.in_store() == before


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.append({tests!r})
import test_sweep_sync as tests
from headway.cluster.engines import settings
from headway.cluster.submit import runs, sweep_request, sweep_start
engine = tests.RecordingEngine()
settings.open_engine = runs.open_engine = lambda *_: engine
def dies(real, when=lambda *_: True):
    return lambda *arguments: os.kill(os.getpid(), signal.SIGKILL) if when(*arguments) else real(*arguments)
{dies}
axes = tests.parse_grid(list(tests.GRID), [])
wanted = sweep_request.request_sweep(Path("r.toml"), [], axes, engine="local", name="s", shared=False)
sweep_start.start_sweep(wanted, Path("runs"))
"""


def kill_creator_at(setup: SweepSetup, dies: str) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent), dies=dies)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], cwd=setup.folder, env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_sweep_whose_creator_dies_before_commit_trains_nothing(setup: SweepSetup, monkeypatch) -> None:
    kill_creator_at(setup, "sweep_start.commit = dies(sweep_start.commit)")
    assert "s-lr_2e-2/folder/recipe.json" in setup.in_store()
    assert not any(name.startswith(".sweeps/") for name in setup.in_store())  # so its tasks train nothing
    # its store does not answer: it may be committed
    with monkeypatch.context() as broken:
        broken.setattr(store_runs, "_open", lambda address, **_: (open_store(f"{setup.url}/r.toml"), address))
        (setup.store / "r.toml").write_text("no folder")
        with pytest.raises(RunError, match="sweep s was not fully submitted, and its object store does not answer"):
            start_sweep(setup.request(), setup.runs)
    (setup.store / "r.toml").unlink()
    ids = {run_id(run) for run in list_runs(setup.runs)}
    _, new = start_sweep(setup.request(), setup.runs)
    assert new
    assert not ids & {run_id(run) for run in list_runs(setup.runs)}
    assert setup.local() == [".sweeps/s", "s-lr_1e-2", "s-lr_2e-2"]


def test_sweep_whose_creator_dies_after_commit_is_kept(setup: SweepSetup) -> None:
    kill_creator_at(setup, "Path.replace = dies(Path.replace, lambda path, _: path.name == 'ready.json')")
    assert not is_sweep(setup.runs, "s")
    sweep, new = start_sweep(setup.request(), setup.runs)
    assert (new, sweep.job, setup.engine.launched) == (False, "ab1", [])


# -- results


def record_elsewhere(setup: SweepSetup, run: str, *losses: float) -> None:
    """As if a machine had recorded that, and uploaded it."""
    fetched = fetch_run(f"{setup.url}/{run}", setup.folder / "machine")
    with (fetched.events / "0001-rank-0.jsonl").open("a") as file:
        file.writelines(json.dumps({"loss": loss}) + "\n" for loss in losses)
    StoreMirror(fetched, f"{setup.url}/{run}", 1, lambda: True).close()


def recorded_losses(setup: SweepSetup, run: str) -> list[float]:
    path = setup.runs / run / "events" / "0001-rank-0.jsonl"
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []


def test_only_runs_with_possible_news_are_fetched(setup: SweepSetup, monkeypatch) -> None:
    sweep, _ = start_sweep(setup.request("seed=1,2,3,4"), setup.runs)
    fetched_urls, real = list[str](), fetch_run
    monkeypatch.setattr(
        "headway.agent.remote.store_mirror.fetch_run",
        lambda url, *more: fetched_urls.append(url[-1]) or real(url, *more),
    )
    run_states = {"s-seed_2": "finished", "s-seed_3": "failed"}
    monkeypatch.setattr(sweep_sync, "summarize", lambda run: SimpleNamespace(state=run_states[run.name]))
    for seed in "123":
        record_elsewhere(setup, f"s-seed_{seed}", 3.0, float(seed))
    states = {
        "1": JobStatus("running", starts=1),
        "2": JobStatus("finished", starts=1),
        "3": JobStatus("failed", starts=1),
    }
    setup.engine.states = {f"ab1_{int(seed) - 1}": status for seed, status in states.items()}
    records = SweepSync(setup.runs, sweep)
    records.sync(runs := submitted_sweep_runs(setup.runs, sweep))
    assert sorted(fetched_urls) == ["1", "2", "3"]  # the fourth has not started
    assert [recorded_losses(setup, f"s-seed_{seed}") for seed in "1234"] == [[3.0, 1.0], [3.0, 2.0], [3.0, 3.0], []]
    fetched_urls.clear()
    records.sync(runs)  # too soon
    assert fetched_urls == []
    records.sync(runs, now=True)  # the others were over before they were fetched
    assert fetched_urls == ["1"]
    SweepSync(setup.runs, sweep).sync(runs)  # another process knows of those that finished
    assert sorted(fetched_urls[1:]) == ["1", "3"]
    assert records.trouble == ""


def test_store_that_does_not_answer_is_given_up(setup: SweepSetup, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "x",
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sweep_sync, "PATIENCE_S", 0.1)
    seeds = ",".join(map(str, range(20)))
    sweep, _ = start_sweep(setup.request(f"seed={seeds}"), setup.runs)
    points = tuple(SweepRun(point.run, point.settings, f"s3://bucket/{point.run}") for point in sweep.points)
    unreachable = replace(sweep, points=points)
    setup.engine.states = {f"ab1_{index}": JobStatus("running", starts=1) for index in range(20)}
    fetched_urls, real = list[str](), fetch_run
    monkeypatch.setattr(
        "headway.agent.remote.store_mirror.fetch_run", lambda url, *more: fetched_urls.append(url) or real(url, *more)
    )
    records = SweepSync(setup.runs, unreachable)
    rows = sweep_results(setup.runs, unreachable, records)
    assert [row.state for row in rows] == ["running"] * 20
    assert records.trouble.startswith("could not fetch 20 of 20 runs from their stores: s3://bucket/s-seed_")
    assert "cannot connect" in records.trouble
    assert store_runs.IN_FLIGHT <= len(fetched_urls) < 20


def test_scattered_failures_do_not_stop_the_others() -> None:
    def act(name: str) -> None:
        if int(name) % 2:
            raise StateError(name)

    reports = list[tuple[int, int]]()
    succeeded, failed = for_each(act, map(str, range(40)), lambda done, total: reports.append((done, total)))
    assert succeeded == {str(number) for number in range(0, 40, 2)}
    assert {name: error.message for name, error in failed.items()} == {str(n): str(n) for n in range(1, 40, 2)}
    assert reports[-1] == (20, 40)


def test_requeued_run_uses_its_own_address(setup: SweepSetup) -> None:
    sweep, _ = start_sweep(setup.request(), setup.runs)
    setup.engine.states = {"ab1_1": JobStatus("failed", starts=1)}
    run = RunFolder(setup.runs / "s-lr_2e-2")
    submit.requeue(setup.runs, run)
    request = setup.engine.launched[-1]
    assert request.array is None
    assert request.command[request.command.index("--run") + 1] == f"{setup.url}/s-lr_2e-2"
    submission = last_submission(run.path)
    assert submission is not None
    assert submission.job == "ab2"
    cancel_sweep(setup.runs, find_sweep(setup.runs, "s"))
    assert setup.engine.cancelled == [sweep.job, "ab2"]
