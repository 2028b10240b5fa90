"""A run's store holds its leader lease and lets any machine resume it: on a folder, and on a real S3 server."""

import contextlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Lab, Lived
from eventually import eventually
from headway.agent import new_run, resume_run, supervise_run
from headway.agent.nodes.lease import ANOTHER_LEADS, LeaderLease
from headway.agent.nodes.store_lease import StoreLease, leader_finder, lease_in_store
from headway.agent.remote.bundle import bundle_names, stored_record_path
from headway.agent.remote.store_mirror import LOG_BYTES, OBJECT_BYTES, StoreMirror, fetch_run, put_folder
from headway.agent.workers.zygote import ZygoteClient
from headway.cli.main import main
from headway.cli.run_lookup import folder_of, own_folder_of, own_root
from headway.cluster.engines import JobStatus, LaunchRequest
from headway.cluster.engines.submissions import Submission, note_submission
from headway.cluster.submit.runs import submitted_runs
from headway.errors import RunError, StateError
from headway.recipe import FaultPlan
from headway.state import CheckpointFacts
from headway.state.object_store import open_store
from headway.state.store_checkpoint import list_remote, upload
from headway.track import RunFolder, create_run, lock_run, next_attempt, read_run, run_id, summarize

sys.path.append(str(Path(__file__).parents[2] / "state"))

pytest_plugins = ["s3"]

FACTS = CheckpointFacts(cursor=0, chain="", data_version="", recipe={}, mesh={})


@pytest.fixture(autouse=True)
def closed_leases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the leases that a test leaves open, so that their threads end."""
    leases, start_checks = list[StoreLease](), StoreLease._start_checks
    monkeypatch.setattr(StoreLease, "_start_checks", lambda self: (leases.append(self), start_checks(self))[1])
    yield
    for lease in leases:
        lease.close()


ON_BOTH = pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
"""For tests of how a store creates and lists objects; the others use a folder by default."""


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of the run in a store."""
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/r"
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store/r"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run(tmp_path / "there", "r", "r")
    run.recipe_file.write_text('{"a": 1}')
    run.tokenizer_file.write_bytes(bytes(range(256)) * 100)
    run_id(run)
    return run


def files(run: RunFolder) -> dict[str, bytes]:
    """Read all files that another machine should have of a run."""
    paths = [path for path in run.path.glob("*/*") if path.is_file()]
    names = [*bundle_names(run), *(f"{path.parent.name}/{path.name}" for path in paths)]
    return {name: (run.path / name).read_bytes() for name in names}


def mirror(run: RunFolder, url: str, number: int = 1) -> None:
    StoreMirror(run, url, number, lambda: True).close()


@ON_BOTH
def test_of_agents_that_start_at_once_one_leads(run: RunFolder, url: str) -> None:
    leaders, refusals = list[int](), list[str]()
    leases = [StoreLease(run, url) for _ in range(4)]

    def begin(number: int) -> None:
        try:
            leases[number].begin(f"n{number}", "127.0.0.1", 1000 + number)
            leaders.append(number)
        except RunError as error:
            refusals.append(error.message)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # each agent has a lease of its own number, or was refused
    assert sorted(leases[number].number for number in leaders) == list(range(1, len(leaders) + 1))
    assert all("another agent has begun to lead" in message for message in refusals)
    assert [lease.holds() for lease in leases].count(True) == 1
    newest = lease_in_store(url)
    assert newest is not None
    assert leader_finder(url)() == (newest.host, newest.port)
    for lease in leases:
        lease.close()


@ON_BOTH
def test_superseded_leader_commits_nothing_to_the_store(run: RunFolder, url: str, monkeypatch) -> None:
    monkeypatch.setattr("headway.agent.nodes.store_lease.CHECK_S", 0.05)
    first, second = StoreLease(run, url), StoreLease(run, url)
    first.begin("a", "h", 1)
    right = LeaderLease(run.leases, "a", "h", 1, store_lease=first)
    right.begin()
    store = open_store(url)
    assert right.store_refusal() is None
    upload(store, 1, FACTS, [], 1, "w1", refusal=right.store_refusal)
    second.begin("b", "h", 2)
    assert (right.refusal(), right.store_refusal()) == (None, ANOTHER_LEADS)
    with pytest.raises(StateError, match=r"step 2 was not committed .* another agent leads the run"):
        upload(store, 2, FACTS, [], 1, "w1", refusal=right.store_refusal)
    assert [entry.step for entry in list_remote(store)] == [1]
    eventually(right.lost)
    with contextlib.closing(StoreMirror(run, url, first.number, first.holds)):
        pass
    assert store.list("records") == store.list("folder") == []


def test_store_of_another_run_is_left_alone(run: RunFolder, url: str, tmp_path: Path) -> None:
    StoreLease(run, url).begin("a", "h", 1)
    other = create_run(tmp_path / "elsewhere", "r", "r")
    with pytest.raises(RunError, match="has checkpoints of another run of this name"):
        StoreLease(other, url).begin("b", "h", 2)


@ON_BOTH
def test_run_folder_is_restored_from_the_store(run: RunFolder, url: str, tmp_path: Path) -> None:
    (run.events / "0001-agent.jsonl").write_text('{"kind":"open"}\n')
    (run.events / "0001-rank-0.jsonl").write_bytes(b"x" * (OBJECT_BYTES + 5))
    (run.logs / "0001-rank-0.log").write_text("said\n")
    mirror(run, url)
    here = fetch_run(url, tmp_path / "here")
    assert here.path == tmp_path / "here" / "r"
    assert files(here) == files(run)
    assert not here.key_file.exists()
    assert next_attempt(here) == 2
    # the run resumes here, and only what is new is put
    before = {item.key for item in open_store(url).list("records")}
    (here.events / "0002-agent.jsonl").write_text('{"kind":"open"}\n')
    here.recipe_file.write_text('{"a": 2}')
    mirror(here, url, 2)
    new = [item for item in open_store(url).list("records") if item.key not in before]
    assert sum(item.bytes for item in new) < 200
    # and back on the first machine
    assert files(fetch_run(url, run.path.parent)) == files(here)
    assert run.recipe_file.read_text() == '{"a": 2}'


def test_local_record_of_a_lost_attempt_is_overwritten_with_a_note(
    run: RunFolder, url: str, tmp_path: Path, capsys
) -> None:
    mirror(run, url)
    (run.events / "0001-rank-0.jsonl").write_bytes(b"never seen by anybody else, and longer\n")
    here = fetch_run(url, tmp_path / "here")
    (here.events / "0001-rank-0.jsonl").write_bytes(b"the other\n")
    mirror(here, url, 2)
    assert capsys.readouterr().err == ""
    fetch_run(url, run.path.parent)
    assert "local changes to events/0001-rank-0.jsonl were overwritten from the store" in capsys.readouterr().err
    fetch_run(url, run.path.parent)
    assert capsys.readouterr().err == ""
    assert (run.events / "0001-rank-0.jsonl").read_bytes() == b"the other\n"


def test_logs_are_bounded_and_records_are_not(run: RunFolder, url: str, tmp_path: Path) -> None:
    (run.logs / "0001-rank-0.log").write_bytes(b"a" * (2 * LOG_BYTES))
    (run.events / "0001-rank-0.jsonl").write_bytes(b"b" * (3 * LOG_BYTES))
    mirror(run, url)
    here = fetch_run(url, tmp_path / "here")
    assert (here.logs / "0001-rank-0.log").stat().st_size == LOG_BYTES
    assert (here.events / "0001-rank-0.jsonl").stat().st_size == 3 * LOG_BYTES


@pytest.mark.parametrize("name", ["../x", "key", "/tmp/x", "events/../../x", "leases/000001.json", "recipe.json"])
def test_no_piece_escapes_the_folder(run: RunFolder, tmp_path: Path, name: str) -> None:
    url = f"file://{tmp_path}/store/r"
    (tmp_path / "store").mkdir()
    put_folder(run, open_store(url))
    open_store(url).put("records/000001-00000001", memoryview(b'{"files": [["%s", 0, 1]]}\nx' % name.encode()))
    with pytest.raises(RunError, match="may read or append to"):
        fetch_run(url, tmp_path / "here")
    with pytest.raises(RunError):
        stored_record_path(run, name)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[]\nx", b'{"files": [["events/0001-agent.jsonl", 0, 9]]}\nshort'])
def test_damaged_piece_is_named(run: RunFolder, tmp_path: Path, content: bytes) -> None:
    url = f"file://{tmp_path}/store/r"
    (tmp_path / "store").mkdir()
    put_folder(run, open_store(url))
    open_store(url).put("records/000001-00000001", memoryview(content))
    with pytest.raises(StateError, match="records/000001-00000001 is damaged"):
        fetch_run(url, tmp_path / "here")


def test_fetch_refuses_a_missing_run_and_a_folder_of_another(run: RunFolder, url: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"there is no run at {url}") as missing:
        fetch_run(url, tmp_path / "here")
    assert (missing.value.hint or "").endswith(f": {url.rpartition('/')[0]}/RUN")
    put_folder(run, open_store(url))
    run_id(create_run(tmp_path / "here", "r", "r"))
    with pytest.raises(RunError, match="there is another run r in"):
        fetch_run(url, tmp_path / "here")


def test_fetch_brings_a_folder_up_to_date(run: RunFolder, url: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """By its address on a machine that has nothing."""
    (run.events / "0001-agent.jsonl").write_text('{"kind":"open"}\n{"kind":"end","t":1,"outcome":"failed"}\n')
    (run.events / "0001-rank-0.jsonl").write_text('{"kind":"open"}\n{"kind":"step","t":1,"step":7,"loss":1.5}\n')
    mirror(run, url)
    monkeypatch.setattr("sys.argv", ["headway", "fetch", url, "--runs", str(tmp_path / "here"), "--json"])
    with contextlib.suppress(SystemExit):
        main()
    expected = {"run": "r", "step": 7, "attempts": 1, "loss": 1.5, "state": "failed"}
    assert json.loads(capsys.readouterr().out) == expected
    monkeypatch.setattr("sys.argv", ["headway", "fetch", url, "--runs", str(tmp_path / "here")])
    with contextlib.suppress(SystemExit):
        main()
    first, *commands = capsys.readouterr().out.replace("next: ", "").splitlines()
    assert first == "r: step 7, 1 attempt, failed"
    verbs = [line.split()[:3] for line in commands]  # too long for one line
    assert verbs == [["headway", verb, "r"] for verb in ("report", "logs", "resume")]


@pytest.mark.parametrize(
    ("events", "ago_s", "how", "resume"),
    [
        ([{"kind": "alive", "t": 5_000_000_000}], 10, "training", False),
        ([{"kind": "alive", "t": 5_000_000_000}], 1000, "no records for 00:1", True),
        ([{"kind": "end", "t": 5, "outcome": "failed", "recovery": "resuming from step 3"}], 10, "training", False),
        ([{"kind": "end", "t": 5, "outcome": "stopped"}], 10, "stopped", True),
        ([{"kind": "end", "t": 5, "outcome": "finished"}], 1000, "finished", False),
    ],
)
def test_fetch_suggests_resume_only_for_runs_that_nobody_trains(
    run: RunFolder, tmp_path: Path, monkeypatch, capsys, events, ago_s: float, how: str, resume: bool
) -> None:
    header = {"kind": "open", "format": 1, "attempt": 1, "process": "agent", "wall": time.time() - ago_s - 5}
    (run.events / "0001-agent.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [header, *events]))
    url = f"file://{tmp_path}/store/r"
    mirror(run, url)
    monkeypatch.setattr("sys.argv", ["headway", "fetch", url, "--runs", str(tmp_path / "here")])
    with contextlib.suppress(SystemExit):
        main()
    first, _, commands = capsys.readouterr().out.partition("next: ")
    assert how in first
    assert ("headway resume r" in commands) == resume


def test_fetching_a_missing_run_fails_and_creates_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    url = f"file://{tmp_path}/store/r"
    for verb in (["fetch", url], ["resume", url], ["agent", "--run", url]):
        monkeypatch.setattr("sys.argv", ["headway", *verb, "--runs", str(tmp_path / "here")])
        with pytest.raises(SystemExit) as exited:
            main()
        assert (exited.value.code, f"there is no run at {url}" in capsys.readouterr().err) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("steps", "which"), [([200], "checkpoint 200 exists"), ([100, 200], "checkpoints 100-200 exist")]
)
def test_checkpoints_without_run_metadata_are_named_with_the_command_that_uses_them(
    tmp_path: Path, monkeypatch, capsys, steps: list[int], which: str
) -> None:
    url = f"file://{tmp_path}/store/r"
    for step in steps:
        open_store(url).put(f"step-{step:08d}.json", memoryview(b"{}"))
    for verb in (["fetch", f"{url}/"], ["resume", url]):
        monkeypatch.setattr("sys.argv", ["headway", *verb, "--runs", str(tmp_path / "here")])
        with pytest.raises(SystemExit) as exited:
            main()
        error = capsys.readouterr().err
        assert (exited.value.code, f"no run metadata at {url}, but {which}" in error) == (2, True)
        assert f"headway train --from {url}/step-00000200 --name r-2 " in error
    assert not (tmp_path / "here").exists()


def test_resume_of_a_checkpoints_address_names_the_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    for step in ("/step-200", "@200"):
        monkeypatch.setattr("sys.argv", ["headway", "resume", f"s3://bucket/r{step}", "--runs", str(tmp_path)])
        with pytest.raises(SystemExit) as exited:
            main()
        assert exited.value.code == 2
        assert "the run's address is s3://bucket/r" in capsys.readouterr().err


def test_start_failure_of_an_agent_reaches_the_submitting_machine(recipe, tmp_path: Path, monkeypatch, capsys) -> None:
    """Its data is not on that machine, where the job's own log stays too."""
    url = f"file://{tmp_path}/store"
    run = new_run(recipe({"checkpoint.store": {"url": url}}), tmp_path / "runs", workers=1).folder
    address = f"{url}/{run.name}"
    settings = json.loads(run.recipe_file.read_text())
    settings["data"]["path"] = str(tmp_path / "nowhere")
    run.recipe_file.write_text(json.dumps(settings))
    run_id(run)
    put_folder(run, open_store(address))
    note_submission(run.path, Submission("slurm", "1", "cpux1", LaunchRequest("r", ("true",), run.path, shared=False)))
    outputs = list[str]()
    for verb, root in (
        (["agent", "--run", address], "there"),
        (["fetch", run.name], "runs"),
        (["logs", run.name], "runs"),
    ):
        monkeypatch.setattr("sys.argv", ["headway", *verb, "--runs", str(tmp_path / root)])
        with contextlib.suppress(SystemExit):
            main()
        captured = capsys.readouterr()
        outputs.append(captured.out + captured.err)
    assert all(f"{tmp_path}/nowhere" in output for output in outputs), outputs
    assert "not started" in outputs[1]


def submitted_elsewhere(recipe, tmp_path: Path) -> RunFolder:
    """A run submitted to machines that do not see its folder."""
    stored = recipe({"checkpoint.store": {"url": f"file://{tmp_path}/store"}})
    run = new_run(stored, tmp_path / "runs", workers=1).folder
    note_submission(run.path, Submission("slurm", "1", "cpux1", LaunchRequest("r", ("true",), run.path, shared=False)))
    run_id(run)
    return run


def record_elsewhere(run: RunFolder, tmp_path: Path, *events: dict[str, object]) -> None:
    """Put records of its agent into its store."""
    there = RunFolder(tmp_path / "elsewhere" / run.name)
    shutil.copytree(run.path, there.path)
    lines = [{"kind": "open"}, *events]
    (there.events / "0001-agent.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mirror(there, f"file://{tmp_path}/store/{run.name}")


def test_runs_and_report_show_what_the_store_of_a_remote_run_has(recipe, tmp_path, capsys, monkeypatch) -> None:
    run = submitted_elsewhere(recipe, tmp_path)
    monkeypatch.setenv("HEADWAY_RUNS", str(tmp_path / "runs"))

    def headway(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["headway", *words])
        with contextlib.suppress(SystemExit):
            main()
        return capsys.readouterr()

    out, _ = headway("runs")
    assert "submitted" in out
    note = f"note: {run.name} is on other machines and may be further on: headway fetch {run.name}"
    assert note in " ".join(out.split())
    _, err = headway("report", run.name)
    assert "note: the records here may be out of date: there is no run at" in err
    record_elsewhere(run, tmp_path, {"kind": "end", "t": 1, "outcome": "finished", "reason": "all steps done"})
    out, err = headway("report", run.name, "--json")
    assert (json.loads(out)["state"], err) == ("finished", "")
    out, _ = headway("runs")
    assert "finished" in out
    assert "on other machines" not in out
    (run.path / "jobs.jsonl").write_text("torn\n")
    assert "finished" in headway("runs")[0]
    run.recipe_file.write_text("{")
    note_submission(run.path, Submission("slurm", "2", "cpux1", LaunchRequest("r", ("true",), run.path, shared=False)))
    (run.events / "0001-agent.jsonl").unlink()
    assert "on other machines" in headway("runs")[0]  # whatever has become of its recipe


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ({"outcome": "finished", "reason": "all steps done"}, "finished", "all steps done"),
        ({"outcome": "failed", "reason": "worker 0 died"}, "failed", "worker 0 died"),
        ({"outcome": "stopped", "reason": "on request"}, "failed", "saved, but was not restarted"),
        ({"outcome": "failed", "reason": "died", "recovery": "from step 3"}, "unknown", "its records show no end"),
        (None, "unknown", "there is no run at"),
    ],
)
def test_job_forgotten_by_its_engine_has_the_state_of_its_records(
    recipe, tmp_path: Path, monkeypatch, end: dict | None, state: str, reason: str
) -> None:
    """Records are fetched from the store; without any, the state is unknown."""
    run = submitted_elsewhere(recipe, tmp_path)
    if end is not None:
        record_elsewhere(run, tmp_path, {"kind": "end", "t": 1, **end})

    class Forgetful:
        def probe(self) -> None:
            pass

        def status(self, jobs: list[str]) -> dict[str, JobStatus]:
            return {job: JobStatus("unknown", "Slurm has forgotten it") for job in jobs}

    monkeypatch.setattr("headway.cluster.engines.settings.open_engine", lambda *_: Forgetful())
    (submitted,) = submitted_runs(tmp_path / "runs")
    assert (submitted.status.state, reason in submitted.status.reason) == (state, True), submitted.status


def test_stale_folder_of_another_run_is_replaced(run: RunFolder, tmp_path: Path, monkeypatch) -> None:
    """In the machine's own folder; a folder that somebody names is left alone, and so is one in use."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "machine"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)
    (tmp_path / "machine").mkdir()
    url = f"file://{tmp_path}/store/r"
    put_folder(run, open_store(url))
    stale = create_run(own_root(None), "r", "r")
    run_id(stale)
    (stale.events / "0001-agent.jsonl").write_text("of another")
    with lock_run(stale), pytest.raises(RunError, match="there is another run r"):
        own_folder_of(url, None)
    fetched = own_folder_of(url, None)
    assert (fetched.path, run_id(fetched)) == (stale.path, run_id(run))
    assert list(fetched.events.iterdir()) == []
    named = create_run(tmp_path / "named", "r", "r")
    run_id(named)
    with pytest.raises(RunError, match="there is another run r"):
        own_folder_of(url, tmp_path / "named")


@pytest.mark.slow
def test_run_resumes_on_a_bare_machine(recipe, lab: Lab, zygote: ZygoteClient, tmp_path: Path) -> None:
    """Machine and folder are lost, with the steps after the last upload; the result is that of an undisturbed run."""
    (tmp_path / "store").mkdir()
    rules = {"url": f"file://{tmp_path}/store", "every_steps": 2}
    stored = recipe({"train.steps": 8, "checkpoint.every_steps": 2, "checkpoint.store": rules})
    own = {"apart": True, "threads": 1}
    first = new_run(stored, tmp_path / "lost", name="r").model_copy(update=own | {"faults": FaultPlan().kill(6)})
    assert supervise_run(first, warm=zygote).state == "failed"
    before = read_run(first.folder)
    shutil.rmtree(tmp_path / "lost")
    run = fetch_run(f"{rules['url']}/r", tmp_path / "bare")
    assert read_run(run) == before
    again = resume_run(run, []).model_copy(update=own)
    assert (again.number, again.from_step) == (2, 4)
    assert supervise_run(again, warm=zygote).state == "finished"
    undisturbed, resumed = lab.train(recipe({"train.steps": 8})), Lived(run, None)
    assert (resumed.chain, resumed.digest) == (undisturbed.chain, undisturbed.digest)
    copy = fetch_run(f"{rules['url']}/r", tmp_path / "elsewhere")
    assert (summarize(copy).state, summarize(copy).step) == ("finished", 8)


def test_single_machine_run_holds_a_store_lease_and_stops_when_superseded(lab, recipe, tmp_path) -> None:
    url = f"file://{tmp_path}/store"
    store = {"url": url, "every_steps": 40}
    settings = {"checkpoint.store": store, "checkpoint.every_steps": 40, "train.steps": 1_000_000}
    attempt = new_run(recipe(settings), tmp_path / "runs", workers=1).model_copy(update={"apart": True, "threads": 1})
    run, address = attempt.folder, f"{url}/{attempt.run.name}"
    last_steps = list[int]()

    def elsewhere(_stops_asked: int) -> None:
        """Another start of the same run, once this one has put something there."""
        if not last_steps and steps_in(address):
            other = StoreLease(run, address)
            other.begin("another", "", 0)
            last_steps.append(max(steps_in(address)))
            other.close()

    outcome = supervise_run(attempt, elsewhere, warm=lab._zygote)
    assert (outcome.state, lease_in_store(address).number) == ("failed", 2)
    assert "another machine's agent leads this run now" in outcome.reason
    assert sum(step > last_steps[0] for step in steps_in(address)) <= 1  # at most the upload under way
    folder, apart = folder_of(attempt.run.name, tmp_path / "runs", alone=True)
    assert (folder.path, apart) == (run.path, True)  # resuming it goes through the store


def steps_in(address: str) -> list[int]:
    return [entry.step for entry in list_remote(open_store(address))]
