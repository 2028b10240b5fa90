"""Live trackers: each value of the record arrives once and in order, whatever server and process do."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import Lab
from eventually import eventually
from headway.agent.supervise.tracker_process import TrackerProcess
from headway.errors import RecipeError
from headway.recipe import Recipe, check_resumable
from headway.recipe.track import TensorBoard, Track, Webhook
from headway.track import Recorder, RunFolder, record_path
from headway.track.trackers import RunFacts, Scalars, Sent, State, Tracker, Unsendable
from headway.track.trackers.feed import MOST_BYTES, EventFeed
from headway.track.trackers.sender import Sender
from headway.track.trackers.tensorboard import TensorBoardTracker
from headway.track.trackers.webhook import WebhookTracker


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a-run")
    folder.path.mkdir()
    return folder


@pytest.fixture
def facts(run: RunFolder, recipe: Callable[..., Recipe]) -> RunFacts:
    return RunFacts(run.name, "id", run.path, recipe())


def write_steps(run: RunFolder, steps: range, process: str = "rank-0", kind: str = "step") -> None:
    with Recorder(record_path(run.events, 1, process), attempt=1, process=process) as recorder:
        for step in steps:
            values = {"values": {"own": step}} if kind == "logged" else {"loss": 1 / step, "data": 1, "compute": 1}
            recorder.event(kind, step=step, **values)


class Scripted(Tracker):
    """A tracker that fails as a test says, and keeps what has arrived."""

    name = "scripted"

    def __init__(self, faults: Iterator[Exception | None], arrived: list[Sent]) -> None:
        self._faults, self.arrived = faults, arrived
        self.opened = 0

    def open(self, run: RunFacts, known: Mapping[str, Any]) -> dict[str, Any]:
        self.opened += 1
        return {"opened": known.get("opened", 0) + 1}

    def send(self, batch: Sequence[Sent]) -> None:
        fault = next(self._faults, None)
        if fault is not None:
            raise fault
        self.arrived += batch

    def close(self, outcome: str | None) -> None:
        pass


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), min_size=1, max_size=6),
    cut=st.integers(64, 400),
)
def test_every_step_arrives_once_after_errors_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, facts: RunFacts, parts: list[tuple[int, bool, bool]], cut: int
) -> None:
    run, arrived, now, first = RunFolder(tmp_path_factory.mktemp("run")), list[Sent](), [0.0], 1
    faults: list[Exception | None] = []

    def sender() -> Sender:
        return Sender(run, facts, Scripted(iter(lambda: faults.pop() if faults else None, "never"), arrived),
                      clock=lambda: now[0])  # fmt: skip

    sending = sender()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.track.trackers.feed.MOST_BYTES", cut)
        for steps, fails, restarts in parts:
            write_steps(run, range(first, first + steps))
            first += steps
            if fails:
                faults.append(ConnectionError("gone"))
                assert not sending.advance()
                assert sending.trouble is not None
                assert not sending.advance()  # it waits first
                now[0] += 100
            if restarts:
                sending = sender()
            assert sending.advance()
    assert [item.step for item in arrived if isinstance(item, Scalars)] == list(range(1, first))


def test_refused_batch_is_left_out_and_said(run: RunFolder, facts: RunFacts) -> None:
    write_steps(run, range(1, 4))
    arrived = list[Sent]()
    sending = Sender(run, facts, Scripted(iter([Unsendable("HTTP 413")]), arrived))
    assert sending.advance()
    assert "refused a part of the record" in str(sending.trouble)
    write_steps(run, range(4, 6))
    assert sending.advance()
    assert [item.step for item in arrived if isinstance(item, Scalars)] == [4, 5]
    assert sending.trouble is None


@pytest.mark.parametrize("saved", [b"", b"[]", b'{"offsets": 3}', b'{"offsets": {"a": -1}}', b"\xff"])
def test_damaged_place_begins_anew(run: RunFolder, facts: RunFacts, saved: bytes) -> None:
    run.trackers.mkdir()
    (run.trackers / "scripted.json").write_bytes(saved)
    write_steps(run, range(1, 3))
    arrived = list[Sent]()
    assert Sender(run, facts, Scripted(iter([]), arrived)).advance()
    assert len(arrived) == 2


def test_only_every_nth_step_and_the_last_are_sent_but_all_logged_values(run: RunFolder, facts: RunFacts) -> None:
    write_steps(run, range(1, 9))
    write_steps(run, range(1, 4), process="user-rank-0", kind="logged")
    write_steps(run, range(1, 9), process="rank-1")
    arrived = list[Sent]()
    sending = Sender(run, facts, Scripted(iter([]), arrived), every_steps=3)
    sending.advance()
    sending.advance(ended=True)
    scalars = [item for item in arrived if isinstance(item, Scalars)]
    assert [item.step for item in scalars if "loss" in item.values] == [3, 6, 8]
    assert [item.values for item in scalars if "own" in item.values] == [{"own": 1.0}, {"own": 2.0}, {"own": 3.0}]


def test_torn_and_foreign_lines_are_left_out(run: RunFolder) -> None:
    write_steps(run, range(1, 3))
    with record_path(run.events, 1, "rank-0").open("ab") as file:
        file.write(b'\xff\n[]\n{"kind":7}\n{"kind":"step","step":"x"}\n{"kind":"log","message":"' + b"x" * MOST_BYTES)
        file.write(b'"}\n{"kind":"step","step":3,"t":1,"loss":1}\n{"kind":"step","st')
    feed = EventFeed(run)
    assert [item.step for batch in feed.batches() for item in batch if isinstance(item, Scalars)] == [1, 2, 3]


class Hook(BaseHTTPRequestHandler):
    """Takes posts; answers with the next of the server's statuses, else 200."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))  # type: ignore[attr-defined]
        status = self.server.statuses.pop(0) if self.server.statuses else 200  # type: ignore[attr-defined]
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Hook)
    server.got, server.statuses = [], []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_webhook_posts_states_and_chosen_steps(facts: RunFacts, hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOOK", f"http://127.0.0.1:{hook.server_port}/secret")
    tracker = WebhookTracker(Webhook(variable="MY_HOOK", every_steps=2))
    tracker.open(facts, {})
    tracker.send([Scalars(step, 0.0, {"loss": float("nan")}) for step in (1, 2)])
    tracker.send([State("finished", 1.0, "all steps done", 4, {"eval_loss": 2.5})])
    assert [(body["event"], body["step"], body["values"]) for body in hook.got] == [
        ("metrics", 2, {"loss": None}), ("finished", 4, {"eval_loss": 2.5}),
    ]  # fmt: skip
    assert hook.got[1]["text"] == "a-run finished at step 4: all steps done: eval_loss 2.5"
    for status, error in ((500, OSError), (401, OSError), (302, OSError), (413, Unsendable)):
        hook.statuses.append(status)
        with pytest.raises(error) as raised:
            tracker.send([State("stopped", 1.0)])
        assert "secret" not in str(raised.value)
        assert str(status) in str(raised.value)


def test_webhook_without_its_variable_says_which(facts: RunFacts) -> None:
    with pytest.raises(ValueError, match="the environment variable NOT_SET has no URL"):
        WebhookTracker(Webhook(variable="NOT_SET")).open(facts, {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_sent(tmp_path: Path, facts: RunFacts, run: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(run, range(1, 6))
    sending = Sender(run, facts, TensorBoardTracker(TensorBoard(folder=str(tmp_path / "tb"))))
    assert sending.advance()
    sending.close()
    events = EventAccumulator(str(tmp_path / "tb" / run.name)).Reload()
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("loss")] == [
        (step, round(1 / step, 6)) for step in range(1, 6)
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"mlflow": {"uri": "http://me:pw@host"}}, "an address with a password"),
        ({"webhook": {}}, "needs either url, or variable"),
        ({"webhook": {"url": "ftp://x"}}, "begins with http"),
        ({"webhook": {"url": "https://t:s@x/y"}}, "an address with a password"),
        ({"mlfow": {}}, "mlfow"),
    ],
)
def test_wrong_settings_are_refused(recipe: Callable[..., Recipe], section: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        recipe({"track": section})
    assert "pw" not in str(raised.value.hint)


def test_trackers_may_change_when_a_run_resumes(recipe: Callable[..., Recipe]) -> None:
    old, new = recipe(), recipe({"track": {"webhook": {"variable": "X"}, "every_steps": 5}})
    check_resumable(old, new)
    check_resumable(new, old)
    check_resumable(new, recipe({"track": {"mlflow": {"uri": "http://h"}}}))


@pytest.mark.slow
def test_process_is_started_again_and_ends_with_the_run(
    lab: Lab, recipe: Callable[..., Recipe], hook: Any, tmp_path: Path
) -> None:
    lived = lab.train(recipe({"train.steps": 2, "train.warmup_steps": 0}))
    settings = Track(webhook=Webhook(url=f"http://127.0.0.1:{hook.server_port}/x", every_steps=1))
    changed = recipe({"track": settings.model_dump()})
    lived.run.recipe_file.write_text(changed.model_dump_json())
    now = [0.0]
    with Recorder(tmp_path / "0009-agent.jsonl", attempt=9, process="agent") as recorder:
        process = TrackerProcess(lived.run, settings, clock=lambda: now[0])

        def ticked(condition: Callable[[], Any]) -> Any:
            now[0] += 10
            process.tick(recorder)
            return condition()

        eventually(lambda: ticked(lambda: hook.got and hook.got[-1]["event"] == "finished"))
        first, running = process.pid, process._process
        assert running is not None
        running.kill()
        eventually(lambda: ticked(lambda: process.pid not in (None, first)))
        second = process._process
        assert second is not None
        process.close()
        second.returncode = None
        eventually(lambda: second.poll() is not None)
    assert [body["event"] for body in hook.got].count("metrics") == 2


def test_dead_server_costs_one_warning(run: RunFolder, tmp_path: Path) -> None:
    run.trackers.mkdir()
    now = [0.0]
    process = TrackerProcess(run, Track(webhook=Webhook(url="http://127.0.0.1:9/x")), clock=lambda: now[0])
    process._start = lambda: None  # type: ignore[method-assign, assignment, return-value]
    with Recorder(tmp_path / "record.jsonl", attempt=1, process="agent") as recorder:
        for trouble in ("refused", "refused", "timed out", None, None, "refused"):
            (run.trackers / "webhook.json").write_text(json.dumps({"trouble": trouble}))
            now[0] += 10
            process.tick(recorder)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    texts = [line["text"] for line in lines if line["kind"] == "tracker"]
    assert texts == ["refused", "webhook receives the run's metrics again", "refused"]
