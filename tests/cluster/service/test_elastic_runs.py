"""Elastic training runs of the service: sizes checked and predicted, grown, shrunk and replaced while they train."""

import json
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("sqlalchemy")

from conftest import Lived
from eventually import eventually
from headway.agent import new_run, supervise_run
from headway.cluster.engines import LaunchRequest
from headway.cluster.service.connection import connect, job_path
from headway.cluster.service.service_engine import ServiceEngine
from headway.recipe import Recipe, load_recipe, to_toml
from headway.track import RunFolder
from service_process import ServiceProcess, headway, headway_json

NODE_AGENT = "headway.cluster.service.node_process"
DEMO = Path(__file__).parents[3] / "recipes/demo.toml"
ONE_THREAD = "taskset -pc $((HEADWAY_MACHINE % 2)) $$ >/dev/null"
"""Gives each agent one core: equal thread counts give equal bits."""
SHORT = {
    "model.layers": 2,
    "model.dim": 64,
    "model.heads": 2,
    "model.kv_heads": 1,
    "data.seq": 64,
    "train.lr": 1e-3,
    "train.schedule": "constant",
    "eval.every_steps": 0,
}
SEGMENT = 10
"""Steps that a run takes with each size, at least."""


def small_recipe(dataset: Path, **settings: object) -> Recipe:
    values = SHORT | {"data.path": str(dataset)} | {key.replace("__", "."): value for key, value in settings.items()}
    return load_recipe(DEMO, [f"{key}={json.dumps(value)}" for key, value in values.items()])


class Cluster:
    """A service with emulated nodes on a fast clock, and jobs that hold GPUs until they are told to end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: str, *options: str) -> None:
        file = folder / "engines.toml"
        file.write_text(f"[service]\nsetup = ['{ONE_THREAD}']\ngrace_s = 60\n")
        monkeypatch.setenv("HEADWAY_ENGINES", str(file))
        self.folder, self.runs = folder, folder / "runs"
        self.service = ServiceProcess(self.runs, "--emulate", shape, "--speed", "3000", *options)
        self.service.start()

    def row(self, job: str) -> dict:
        (row,) = connect(self.runs).get(job_path(job))
        return row

    def placement(self, job: str) -> list[int]:
        """GPUs per node that a running job holds, most first."""
        row = self.row(job)
        return sorted((len(place["gpus"]) for place in row["placement"]), reverse=True) if running(row) else []

    def hold_gpus(self, name: str, gpus: int) -> str:
        folder = self.folder / name
        folder.mkdir()
        wait = ("bash", "-c", "until [ -e end ]; do sleep 0.05; done")
        site = {"priority": "10", "preemptible": "yes"}
        job = ServiceEngine(self.runs).launch(LaunchRequest(name, wait, folder, gpus=gpus, grace_s=5, site=site))
        eventually(lambda: running(self.row(job)), self.service.log.read_text)
        return job

    def release(self, name: str) -> None:
        (self.folder / name / "end").touch()

    def reaches(self, run: str, placement: list[int]) -> None:
        """Wait until a run trains on so many GPUs per node."""
        eventually(lambda: self.placement(run) == placement, lambda: self.diagnosis(run))
        starts = self.row(run)["starts"]
        eventually(lambda: len(list((self.runs / run / "events").glob("*-rank-0.jsonl"))) >= starts)
        before = self.last_step(run)
        eventually(lambda: self.last_step(run) >= before + SEGMENT, lambda: self.diagnosis(run))

    def last_step(self, run: str) -> int:
        return max((event["step"] for event in Lived(RunFolder(self.runs / run), None).events("step")), default=0)

    def diagnosis(self, run: str) -> str:
        logs = sorted([*(self.runs / run / "jobs").rglob("*.log"), *(self.runs / run / "logs").glob("*.log")])
        texts = [f"--- {path.relative_to(self.runs)}\n{path.read_text()[-2000:]}" for path in logs]
        return "\n".join([str(self.row(run)), self.service.log.read_text()[-2000:], *texts])


def running(row: dict) -> bool:
    return row["state"] == "running"


def undisturbed(recipe: Recipe, folder: Path, workers: int) -> Lived:
    attempt = new_run(recipe, folder, workers=workers).model_copy(update={"threads": 1})
    return Lived(attempt.folder, supervise_run(attempt))


@pytest.mark.slow
def test_run_grows_over_nodes_and_shrinks_and_its_losses_are_those_of_one_size(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(dataset, train__steps=100_000)  # it is cancelled once it has had each size
    (tmp_path / "r.toml").write_text(to_toml(recipe))
    cluster = Cluster(tmp_path, monkeypatch, "2x3", "--cpus", "8")
    try:
        cluster.hold_gpus("large", 3)
        cluster.hold_gpus("small", 1)
        words = ("submit", str(tmp_path / "r.toml"), "--engine", "service", "--on", "cpux2", "--name", "demo")
        submitted = headway_json(cluster.runs, *words, "--sizes", "2:1,4:1.5")
        assert submitted["sizes"] == [[2, 1.0], [4, 1.5]]  # type: ignore[index]
        cluster.reaches("demo", [2])
        for name in ("large", "small"):
            cluster.release(name)
        cluster.reaches("demo", [3, 1])  # a whole node, and one GPU of the other
        cluster.hold_gpus("other", 3)
        cluster.reaches("demo", [2])
        headway(cluster.runs, "cancel", "demo")
        eventually(lambda: cluster.row("demo")["state"] == "cancelled", lambda: cluster.diagnosis("demo"))
        assert cluster.row("demo")["starts"] == 3, cluster.diagnosis("demo")
        kinds = [event["kind"] for event in connect(cluster.runs).get("/api/v1/events")["events"]]
        assert kinds.count("resize") == 2
        cluster.release("other")
    finally:
        cluster.service.stop()
    run = Lived(RunFolder(cluster.runs / "demo"), None)
    starts = run.events("attempt", "agent")
    assert [(start["workers"], start.get("nodes", 1)) for start in starts] == [(2, 1), (4, 2), (2, 1)]
    steps = run.events("step")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), "none lost, none trained twice"
    alone = undisturbed(small_recipe(dataset, train__steps=len(steps)), tmp_path / "alone", 2).events("step")
    first = starts[1]["from_step"]
    assert SEGMENT <= first < starts[2]["from_step"] < len(steps)
    assert [step["chain"] for step in steps[:first]] == [step["chain"] for step in alone[:first]], "bit for bit"
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in alone], rel=1e-4)


def node_agent_of(runs: Path, node: str) -> psutil.Process:
    """The agent of an emulated node."""
    folder = f"/{node}"
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if NODE_AGENT in line and any(word.endswith(folder) and str(runs) in word for word in line):
            return process
    raise AssertionError(f"node {node} has no agent")


def kill_start(job: str, start: int, rank: int, runs: Path) -> None:
    """SIGKILL everything that a start of a job has on a node, as if its power failed."""
    scratch = f"/{job}-{start}-{rank}"
    for process in psutil.process_iter(["environ"]):
        own = (process.info["environ"] or {}).get("HEADWAY_SCRATCH", "")
        if own.endswith(scratch) and str(runs) in own:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0], ids=["another node", "the node of the leader"])
def test_run_of_a_failed_node_is_continued_on_others_from_its_last_save(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    # a fixed mesh: it cannot continue with the workers of one node
    recipe = small_recipe(dataset, train__steps=160, checkpoint__every_steps=20, parallel__shard=4)
    (tmp_path / "r.toml").write_text(to_toml(recipe))
    cluster = Cluster(tmp_path, monkeypatch, "3x1", "--cpus", "2", "--give-up-after", "60")
    stopped: list[psutil.Process] = []
    try:
        words = ("submit", str(tmp_path / "r.toml"), "--engine", "service", "--on", "cpux2x2", "--name", "demo")
        headway(cluster.runs, *words)
        cluster.reaches("demo", [0, 0])  # two of three nodes, with two CPUs each
        eventually(lambda: list((cluster.runs / "demo" / "checkpoints").glob("step-*/manifest.json")))
        row = cluster.row("demo")
        failed = row["placement"][rank]["node"]
        stopped.append(node_agent_of(cluster.runs, failed))
        stopped[0].suspend()  # first, so that it cannot report what follows
        kill_start(row["id"], 1, rank, cluster.runs)
        eventually(lambda: cluster.row("demo")["starts"] == 2, lambda: cluster.diagnosis("demo"))
        eventually(lambda: cluster.row("demo")["state"] == "finished", lambda: cluster.diagnosis("demo"))
        row = cluster.row("demo")
        assert row["starts"] == 2, cluster.diagnosis("demo")
        assert failed not in [place["node"] for place in row["placement"]]
    finally:
        for process in stopped:
            process.resume()
        cluster.service.stop()
    run, alone = Lived(RunFolder(cluster.runs / "demo"), None), undisturbed(recipe, tmp_path / "alone", 4)
    assert (run.chain, run.digest) == (alone.chain, alone.digest)
    resumed = [start["from_step"] for start in run.events("attempt", "agent")]
    assert resumed[-1] >= 20, "from a save, not from the beginning"
