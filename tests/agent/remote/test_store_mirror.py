"""A run's store as the witness of who leads, and as the place from which any machine goes on with it.

On a folder, and on a real S3 server.
"""

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
from headway.agent.nodes.lease import LeaderLease
from headway.agent.nodes.store_lease import StoreLease, leader_finder, lease_in_store
from headway.agent.remote.bundle import bundle_names, place_of_record
from headway.agent.remote.store_mirror import LOG_BYTES, MUCH_BYTES, StoreMirror, fetch_run, put_folder
from headway.agent.workers.zygote import ZygoteClient
from headway.cli.main import main
from headway.cli.run_lookup import folder_of, own_folder_of, own_root
from headway.cluster.engines import JobStatus, LaunchRequest
from headway.cluster.engines.submissions import Submission, note_submission
from headway.cluster.submit.runs import standings
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
def nobody_looks_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No witness looks for leases when its test is over."""
    made, look_on = list[StoreLease](), StoreLease._look_on
    monkeypatch.setattr(StoreLease, "_look_on", lambda self: (made.append(self), look_on(self))[1])
    yield
    for one in made:
        one.close()


ON_BOTH = pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
"""For what rests on how a store creates and lists objects; the rest does by default with a folder."""


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the run lies in a store."""
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
    """All that another machine should have of it."""
    names = [*bundle_names(run), *(f"{one.parent.name}/{one.name}" for one in run.path.glob("*/*") if one.is_file())]
    return {name: (run.path / name).read_bytes() for name in names}


def mirrored(run: RunFolder, url: str, number: int = 1) -> None:
    StoreMirror(run, url, number, lambda: True).close()


@ON_BOTH
def test_of_agents_that_begin_at_once_one_leads(run: RunFolder, url: str) -> None:
    led, refused = list[int](), list[str]()
    witnesses = [StoreLease(run, url) for _ in range(4)]

    def begin(number: int) -> None:
        try:
            witnesses[number].begin(f"n{number}", "127.0.0.1", 1000 + number)
            led.append(number)
        except RunError as error:
            refused.append(error.message)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # each lease is of one; who came later took a later one, or was refused
    assert sorted(witnesses[number].number for number in led) == list(range(1, len(led) + 1))
    assert all("another agent has begun to lead" in one for one in refused)
    assert [one.holds() for one in witnesses].count(True) == 1
    newest = lease_in_store(url)
    assert newest is not None
    assert leader_finder(url)() == (newest.host, newest.port)
    for one in witnesses:
        one.close()


@ON_BOTH
def test_who_was_overtaken_commits_nothing_there(run: RunFolder, url: str, monkeypatch) -> None:
    monkeypatch.setattr("headway.agent.nodes.store_lease.LOOK_S", 0.05)
    first, second = StoreLease(run, url), StoreLease(run, url)
    first.begin("a", "h", 1)
    right = LeaderLease(run.leases, "a", "h", 1, witness=first)
    right.begin()
    store = open_store(url)
    assert right.holds_in_store()
    upload(store, 1, FACTS, [], 1, "w1", allowed=right.holds_in_store)
    second.begin("b", "h", 2)
    assert (right.holds(), right.holds_in_store()) == (True, False)
    with pytest.raises(StateError, match=r"step 2 was not committed .* another agent leads the run"):
        upload(store, 2, FACTS, [], 1, "w1", allowed=right.holds_in_store)
    assert [entry.step for entry in list_remote(store)] == [1]
    eventually(right.lost)
    with contextlib.closing(StoreMirror(run, url, first.number, first.holds)):
        pass
    assert store.list("records") == store.list("folder") == []


def test_a_place_of_another_run_is_left_alone(run: RunFolder, url: str, tmp_path: Path) -> None:
    StoreLease(run, url).begin("a", "h", 1)
    other = create_run(tmp_path / "elsewhere", "r", "r")
    with pytest.raises(RunError, match="has checkpoints of another run of this name"):
        StoreLease(other, url).begin("b", "h", 2)


@ON_BOTH
def test_what_is_in_the_store_makes_the_folder_again(run: RunFolder, url: str, tmp_path: Path) -> None:
    (run.events / "0001-agent.jsonl").write_text('{"kind":"open"}\n')
    (run.events / "0001-rank-0.jsonl").write_bytes(b"x" * (MUCH_BYTES + 5))
    (run.logs / "0001-rank-0.log").write_text("said\n")
    mirrored(run, url)
    here = fetch_run(url, tmp_path / "here")
    assert here.path == tmp_path / "here" / "r"
    assert files(here) == files(run)
    assert not here.key_file.exists()
    assert next_attempt(here) == 2
    # it goes on here, and only what is new goes there
    before = {item.key for item in open_store(url).list("records")}
    (here.events / "0002-agent.jsonl").write_text('{"kind":"open"}\n')
    here.recipe_file.write_text('{"a": 2}')
    mirrored(here, url, 2)
    new = [item for item in open_store(url).list("records") if item.key not in before]
    assert sum(item.bytes for item in new) < 200
    # and back on the first machine
    assert files(fetch_run(url, run.path.parent)) == files(here)
    assert run.recipe_file.read_text() == '{"a": 2}'


def test_a_life_that_was_lost_with_its_machine_gives_its_number_away(
    run: RunFolder, url: str, tmp_path: Path, capsys
) -> None:
    mirrored(run, url)
    (run.events / "0001-rank-0.jsonl").write_bytes(b"never seen by anybody else, and longer\n")
    here = fetch_run(url, tmp_path / "here")
    (here.events / "0001-rank-0.jsonl").write_bytes(b"the other\n")
    mirrored(here, url, 2)
    assert capsys.readouterr().err == ""
    fetch_run(url, run.path.parent)
    assert "events/0001-rank-0.jsonl had here and the store had not was replaced" in capsys.readouterr().err
    fetch_run(url, run.path.parent)
    assert capsys.readouterr().err == ""
    assert (run.events / "0001-rank-0.jsonl").read_bytes() == b"the other\n"


def test_logs_are_bounded_and_records_are_not(run: RunFolder, url: str, tmp_path: Path) -> None:
    (run.logs / "0001-rank-0.log").write_bytes(b"a" * (2 * LOG_BYTES))
    (run.events / "0001-rank-0.jsonl").write_bytes(b"b" * (3 * LOG_BYTES))
    mirrored(run, url)
    here = fetch_run(url, tmp_path / "here")
    assert (here.logs / "0001-rank-0.log").stat().st_size == LOG_BYTES
    assert (here.events / "0001-rank-0.jsonl").stat().st_size == 3 * LOG_BYTES


@pytest.mark.parametrize("name", ["../x", "key", "/tmp/x", "events/../../x", "leases/000001.json", "recipe.json"])
def test_no_piece_leads_out_of_the_folder(run: RunFolder, tmp_path: Path, name: str) -> None:
    url = f"file://{tmp_path}/store/r"
    (tmp_path / "store").mkdir()
    put_folder(run, open_store(url))
    open_store(url).put("records/000001-00000001", memoryview(b'{"files": [["%s", 0, 1]]}\nx' % name.encode()))
    with pytest.raises(RunError, match="may ask for or add to"):
        fetch_run(url, tmp_path / "here")
    with pytest.raises(RunError):
        place_of_record(run, name)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[]\nx", b'{"files": [["events/0001-agent.jsonl", 0, 9]]}\nshort'])
def test_a_damaged_piece_is_named(run: RunFolder, tmp_path: Path, content: bytes) -> None:
    url = f"file://{tmp_path}/store/r"
    (tmp_path / "store").mkdir()
    put_folder(run, open_store(url))
    open_store(url).put("records/000001-00000001", memoryview(content))
    with pytest.raises(StateError, match="records/000001-00000001 is damaged"):
        fetch_run(url, tmp_path / "here")


def test_a_store_without_the_run_and_a_folder_of_another(run: RunFolder, url: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"there is no run at {url}"):
        fetch_run(url, tmp_path / "here")
    put_folder(run, open_store(url))
    run_id(create_run(tmp_path / "here", "r", "r"))
    with pytest.raises(RunError, match="there is another run r in"):
        fetch_run(url, tmp_path / "here")


def test_fetch_brings_a_folder_up_to_date(run: RunFolder, url: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """By its address on a machine that has nothing."""
    (run.events / "0001-agent.jsonl").write_text('{"kind":"open"}\n{"kind":"end","t":1,"outcome":"failed"}\n')
    (run.events / "0001-rank-0.jsonl").write_text('{"kind":"open"}\n{"kind":"step","t":1,"step":7,"loss":1.5}\n')
    mirrored(run, url)
    monkeypatch.setattr("sys.argv", ["headway", "fetch", url, "--runs", str(tmp_path / "here"), "--json"])
    with contextlib.suppress(SystemExit):
        main()
    told = {"run": "r", "step": 7, "attempts": 1, "loss": 1.5, "state": "failed"}
    assert json.loads(capsys.readouterr().out) == told
    monkeypatch.setattr("sys.argv", ["headway", "fetch", url, "--runs", str(tmp_path / "here")])
    with contextlib.suppress(SystemExit):
        main()
    first, last = capsys.readouterr().out.splitlines()
    assert first == "r: step 7, 1 attempt, failed"
    assert last == "next: headway report r, headway logs r, headway resume r"


@pytest.mark.parametrize(
    ("events", "ago_s", "how", "resume"),
    [
        ([{"kind": "alive", "t": 5_000_000_000}], 10, "training", False),
        ([{"kind": "alive", "t": 5_000_000_000}], 1000, "nothing heard of it for 00:1", True),
        ([{"kind": "end", "t": 5, "outcome": "failed", "recovery": "resuming from step 3"}], 10, "training", False),
        ([{"kind": "end", "t": 5, "outcome": "stopped"}], 10, "stopped", True),
        ([{"kind": "end", "t": 5, "outcome": "finished"}], 1000, "finished", False),
    ],
)
def test_who_fetches_is_told_to_resume_only_what_nobody_trains(
    run: RunFolder, tmp_path: Path, monkeypatch, capsys, events, ago_s: float, how: str, resume: bool
) -> None:
    header = {"kind": "open", "format": 1, "attempt": 1, "process": "agent", "wall": time.time() - ago_s - 5}
    (run.events / "0001-agent.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [header, *events]))
    url = f"file://{tmp_path}/store/r"
    mirrored(run, url)
    monkeypatch.setattr("sys.argv", ["headway", "fetch", url, "--runs", str(tmp_path / "here")])
    with contextlib.suppress(SystemExit):
        main()
    first, last = capsys.readouterr().out.splitlines()
    assert how in first
    assert ("headway resume r" in last) == resume


def test_fetching_what_is_not_there_says_so_and_makes_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    url = f"file://{tmp_path}/store/r"
    for verb in (["fetch", url], ["resume", url], ["agent", "--run", url]):
        monkeypatch.setattr("sys.argv", ["headway", *verb, "--runs", str(tmp_path / "here")])
        with pytest.raises(SystemExit) as exited:
            main()
        assert (exited.value.code, f"there is no run at {url}" in capsys.readouterr().err) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_what_kept_an_agent_from_beginning_is_heard_by_who_submitted_it(
    recipe, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Its data is not on that machine; the job's own log is there too, and nobody sees it."""
    url = f"file://{tmp_path}/store"
    made = new_run(recipe({"checkpoint.store": {"url": url}}), tmp_path / "runs", workers=1).folder
    address = f"{url}/{made.name}"
    settings = json.loads(made.recipe_file.read_text())
    settings["data"]["path"] = str(tmp_path / "nowhere")
    made.recipe_file.write_text(json.dumps(settings))
    run_id(made)
    put_folder(made, open_store(address))
    note_submission(
        made.path, Submission("slurm", "1", "cpux1", LaunchRequest("r", ("true",), made.path, shared=False))
    )
    said = list[str]()
    for verb, root in (
        (["agent", "--run", address], "there"),
        (["fetch", made.name], "runs"),
        (["logs", made.name], "runs"),
    ):
        monkeypatch.setattr("sys.argv", ["headway", *verb, "--runs", str(tmp_path / root)])
        with contextlib.suppress(SystemExit):
            main()
        told = capsys.readouterr()
        said.append(told.out + told.err)
    assert all(f"{tmp_path}/nowhere" in words for words in said), said
    assert "not begun" in said[1]


def submitted_elsewhere(recipe, tmp_path: Path) -> RunFolder:
    """A run that machines have which do not see its folder."""
    stored = recipe({"checkpoint.store": {"url": f"file://{tmp_path}/store"}})
    made = new_run(stored, tmp_path / "runs", workers=1).folder
    note_submission(
        made.path, Submission("slurm", "1", "cpux1", LaunchRequest("r", ("true",), made.path, shared=False))
    )
    run_id(made)
    return made


def told_elsewhere(made: RunFolder, tmp_path: Path, *events: dict[str, object]) -> None:
    """What its agent has recorded there, put into its store."""
    there = RunFolder(tmp_path / "elsewhere" / made.name)
    shutil.copytree(made.path, there.path)
    lines = [{"kind": "open"}, *events]
    (there.events / "0001-agent.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    mirrored(there, f"file://{tmp_path}/store/{made.name}")


def test_who_looks_at_a_run_elsewhere_is_told_what_its_store_knows(recipe, tmp_path, capsys, monkeypatch) -> None:
    made = submitted_elsewhere(recipe, tmp_path)
    monkeypatch.setenv("HEADWAY_RUNS", str(tmp_path / "runs"))

    def told(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["headway", *words])
        with contextlib.suppress(SystemExit):
            main()
        return capsys.readouterr()

    out, _ = told("runs")
    assert "submitted" in out
    assert f"note: {made.name} is elsewhere and may be further on: headway fetch {made.name}" in out
    _, err = told("report", made.name)
    assert "note: what is here may be old: there is no run at" in err
    told_elsewhere(made, tmp_path, {"kind": "end", "t": 1, "outcome": "finished", "reason": "all steps done"})
    out, err = told("report", made.name, "--json")
    assert (json.loads(out)["state"], err) == ("finished", "")
    out, _ = told("runs")
    assert "finished" in out
    assert "elsewhere" not in out
    (made.path / "jobs.jsonl").write_text("torn\n")
    assert "finished" in told("runs")[0]
    made.recipe_file.write_text("{")
    note_submission(
        made.path, Submission("slurm", "2", "cpux1", LaunchRequest("r", ("true",), made.path, shared=False))
    )
    (made.events / "0001-agent.jsonl").unlink()
    assert "elsewhere" in told("runs")[0]  # whatever has become of its recipe


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ({"outcome": "finished", "reason": "all steps done"}, "finished", "all steps done"),
        ({"outcome": "failed", "reason": "worker 0 died"}, "failed", "worker 0 died"),
        ({"outcome": "stopped", "reason": "on request"}, "failed", "it has saved, and was not started again"),
        ({"outcome": "failed", "reason": "died", "recovery": "from step 3"}, "unknown", "do not say how it ended"),
        (None, "unknown", "there is no run at"),
    ],
)
def test_a_job_that_its_engine_has_forgotten_stands_as_its_records_say(
    recipe, tmp_path: Path, monkeypatch, end: dict | None, state: str, reason: str
) -> None:
    """They are in the store alone, and are brought; where there are none, nobody knows."""
    made = submitted_elsewhere(recipe, tmp_path)
    if end is not None:
        told_elsewhere(made, tmp_path, {"kind": "end", "t": 1, **end})

    class Forgetful:
        def status(self, jobs: list[str]) -> dict[str, JobStatus]:
            return {job: JobStatus("unknown", "Slurm has forgotten it") for job in jobs}

    monkeypatch.setattr("headway.cluster.submit.runs.open_engine", lambda *_: Forgetful())
    (one,) = standings(tmp_path / "runs")
    assert (one.status.state, reason in one.status.reason) == (state, True), one.status


def test_what_another_run_has_left_on_a_machine_is_not_in_the_way(run: RunFolder, tmp_path: Path, monkeypatch) -> None:
    """In a folder of the machine's own; one that somebody names is left alone, and so is one that is in use."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "machine"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)
    (tmp_path / "machine").mkdir()
    url = f"file://{tmp_path}/store/r"
    put_folder(run, open_store(url))
    left = create_run(own_root(None), "r", "r")
    run_id(left)
    (left.events / "0001-agent.jsonl").write_text("of another")
    with lock_run(left), pytest.raises(RunError, match="there is another run r"):
        own_folder_of(url, None)
    found = own_folder_of(url, None)
    assert (found.path, run_id(found)) == (left.path, run_id(run))
    assert list(found.events.iterdir()) == []
    named = create_run(tmp_path / "named", "r", "r")
    run_id(named)
    with pytest.raises(RunError, match="there is another run r"):
        own_folder_of(url, tmp_path / "named")


@pytest.mark.slow
def test_a_run_goes_on_on_a_bare_machine(recipe, lab: Lab, zygote: ZygoteClient, tmp_path: Path) -> None:
    """Its machine is lost with the folder, steps after the last upload with it; the end is that of one left alone."""
    (tmp_path / "store").mkdir()
    rules = {"url": f"file://{tmp_path}/store", "every_steps": 2}
    kept = recipe({"train.steps": 8, "checkpoint.every_steps": 2, "checkpoint.store": rules})
    own = {"apart": True, "threads": 1}
    first = new_run(kept, tmp_path / "lost", name="r").model_copy(update=own | {"faults": FaultPlan().kill(6)})
    assert supervise_run(first, warm=zygote).state == "failed"
    before = read_run(first.folder)
    shutil.rmtree(tmp_path / "lost")
    run = fetch_run(f"{rules['url']}/r", tmp_path / "bare")
    assert read_run(run) == before
    again = resume_run(run, []).model_copy(update=own)
    assert (again.number, again.from_step) == (2, 4)
    assert supervise_run(again, warm=zygote).state == "finished"
    alone, lived = lab.train(recipe({"train.steps": 8})), Lived(run, None)
    assert (lived.chain, lived.digest) == (alone.chain, alone.digest)
    there = fetch_run(f"{rules['url']}/r", tmp_path / "elsewhere")
    assert (summarize(there).state, summarize(there).step) == ("finished", 8)


def test_a_run_on_one_machine_leads_by_a_lease_and_stops_when_another_has_the_next(lab, recipe, tmp_path) -> None:
    url = f"file://{tmp_path}/store"
    store = {"url": url, "every_steps": 40}
    settings = {"checkpoint.store": store, "checkpoint.every_steps": 40, "train.steps": 1_000_000}
    attempt = new_run(recipe(settings), tmp_path / "runs", workers=1).model_copy(update={"apart": True, "threads": 1})
    run, address = attempt.folder, f"{url}/{attempt.run.name}"
    taken = list[int]()

    def elsewhere(_stops_asked: int) -> None:
        """Another start of the same run, once this one has put something there."""
        if not taken and steps_in(address):
            other = StoreLease(run, address)
            other.begin("another", "", 0)
            taken.append(max(steps_in(address)))
            other.close()

    outcome = supervise_run(attempt, elsewhere, warm=lab._zygote)
    assert (outcome.state, lease_in_store(address).number) == ("failed", 2)
    assert "another machine's agent leads this run now" in outcome.reason
    assert sum(step > taken[0] for step in steps_in(address)) <= 1  # at most what was on its way
    folder, apart = folder_of(attempt.run.name, tmp_path / "runs", alone=True)
    assert (folder.path, apart) == (run.path, True)  # whoever resumes it goes by the store


def steps_in(address: str) -> list[int]:
    return [entry.step for entry in list_remote(open_store(address))]
