"""The live view and the plain lines, fed with events whose story is known."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from headway.agent import new_run
from headway.cli.text import count, duration
from headway.cli.view import LivePanel, LiveStatus, PlainLines, RecordTail, open_view, stopping_line
from headway.track import Header, Record, RunFolder, account, record_path
from headway.track.accounts import SPANS

SECOND = 1_000_000_000
FACTS = {
    "kind": "facts", "t": 0, "total_steps": 100, "tokens_per_step": 1000, "flops_per_token": 5e6, "peak_flops": 1e10,
}  # fmt: skip


def steps(first: int, last: int) -> list[dict]:
    """One step a second, a tenth of it waiting for data."""
    return [
        {
            "kind": "step", "step": n, "t": n * SECOND, "data": SECOND // 10, "compute": SECOND * 9 // 10,
            "loss": 5.0 - n / 100, "grad_norm": 1.0, "lr": 1e-3, "tokens": 1000,
        }
        for n in range(first, last + 1)
    ]  # fmt: skip


def span(name: str, begin: float, end: float) -> list[dict]:
    times = (("begin", begin), ("end-span", end))
    return [{"kind": kind, "name": name, "t": round(t * SECOND)} for kind, t in times]


class Source:
    """Stands for the tail of a file: hands out what it was given, once."""

    def __init__(self) -> None:
        self.events: list[dict] = []

    def poll(self) -> list[dict]:
        events, self.events = self.events, []
        return events


def standing_after(events: list[dict], workers: int = 1) -> LiveStatus:
    standing = LiveStatus(workers=workers)
    for event in events:
        standing.take(event)
    return standing


def test_speed_mfu_and_time_left_follow_the_last_steps() -> None:
    standing = standing_after([FACTS, *steps(1, 40)], workers=2)
    assert standing.tokens_per_s == pytest.approx(1000)
    assert standing.mfu == pytest.approx(1000 * 5e6 / (2 * 1e10))
    assert standing.seconds_left == pytest.approx(60)


def test_largest_overhead_is_shown() -> None:
    spans = [*span("startup", -5, -3), *span("checkpoint", -3, 0)]
    assert standing_after(spans).largest_overhead == ("checkpoint stall", 3.0)
    assert standing_after([*spans, FACTS, *steps(1, 40)]).largest_overhead == ("data stall", pytest.approx(4.0))


def test_overheads_of_a_policy_are_those_of_the_report() -> None:
    """A wait for data of 8 s has 1 s of weight sync, 5 s of generation with 0.5 s of checkpoint, and 1 s of scoring."""
    generate = span("generate", 1.5, 6.5)
    worker = [
        *span("startup", -1, 0),
        *span("sync", 0.5, 1.5), generate[0], *span("checkpoint", 2, 2.5), generate[1], *span("score", 7, 8),
        {"kind": "step", "step": 1, "t": 11 * SECOND, "data": 8 * SECOND, "compute": 3 * SECOND,
         "checkpoint": SECOND // 4, "reward": 0.5, "tokens": 1000},
        *span("evaluation", 11, 13),
    ]  # fmt: skip
    agent = [
        {"kind": "attempt", "t": 0, "workers": 1, "device": "cpu"},
        {"kind": "end", "t": 14 * SECOND, "outcome": "finished"},
    ]
    headers = (Header(1, "agent", wall=100.0, boot="one"), Header(1, "rank-0", wall=101.0, mono=SECOND, boot="one"))
    ledger = account([Record(header, events) for header, events in zip(headers, (agent, worker), strict=True)])
    reported = {name: ledger.accounts[name] for name in SPANS.values()} | {"data stall": ledger.accounts["data stall"]}
    status = standing_after(worker)
    assert status.overhead_ns == {name: ns for name, ns in reported.items() if ns}
    assert status.largest_overhead == ("generation", 4.5)


def test_mfu_of_a_policy_says_that_it_has_generation() -> None:
    policy = [step | {"reward": 0.5} for step in steps(1, 40)]
    assert standing_after([FACTS, *policy]).numbers().endswith("MFU 50% with generation")
    assert standing_after([FACTS, *steps(1, 40)]).numbers().endswith("MFU 50%")


def test_spans_of_the_agent_are_not_the_first_workers(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.events.mkdir()
    for process, seconds in (("agent", 9), ("rank-0", 2)):
        lines = [json.dumps(event) for event in span("startup", 0, seconds)]
        record_path(run.events, 1, process).write_text("\n".join(lines) + "\n")
    status = LiveStatus()
    status.follow(RecordTail(run, 1))
    assert status.largest_overhead == ("start-up", 2.0)


def test_non_finite_loss_is_reported() -> None:
    broken = steps(1, 1)[0] | {"loss": None, "grad_norm": None}
    assert "loss not finite" in standing_after([FACTS, broken]).numbers()


def test_retry_of_the_last_save_says_for_how_long() -> None:
    retry = {"kind": "retry", "t": 0, "message": "no room"}
    for more, words in (
        ({"limit_s": 60.0}, "retrying for at most 60 s: no room"),
        ({}, "retrying: no room"),
    ):
        assert standing_after([retry | more]).notices == [f"cannot save the last state yet, {words}"]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_the_panel_fits_the_terminal(width: int) -> None:
    """No number is broken from its unit; the progress bar is shortened."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    source, standing = Source(), LiveStatus()

    class Screen:
        def update(self, group, refresh: bool) -> None:
            console.print(group)

    panel = LivePanel(standing, source, "demo-1234  2 workers on cpu", Screen(), width)
    panel.tick(0)
    assert "starting" in out.getvalue()
    source.events = [FACTS, *steps(1, 50), {"kind": "eval", "step": 50, "loss": 4.25, "t": 1}]
    panel.tick(1)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    for part in ("step 50/100", "50%", "ETA 00:00:50", "loss 4.5000", "eval 4.2500", "1k tokens/s", "stopping: saving"):
        assert part in shown
    (row,) = [line.rstrip() for line in shown.splitlines() if "ETA" in line]
    assert row.startswith("step 50/100")


def evaluation(step: int, loss: float | None) -> dict:
    return {"kind": "eval", "step": step, "loss": loss, "t": 0}


def test_evaluations_of_steps_that_were_rolled_back_are_not_shown() -> None:
    standing = standing_after([FACTS, *steps(1, 15), evaluation(15, 2.0), *steps(16, 30), evaluation(30, 1.0)])
    assert "eval 1.0000  " in standing.numbers()
    for event in ({"kind": "attempt", "t": 0, "from_step": 20}, *steps(21, 23)):
        standing.take(event)
        assert "eval 2.0000 (step 15)" in standing.numbers()
    for event in (*steps(24, 30), evaluation(30, 0.5)):
        standing.take(event)
    assert "eval 0.5000  " in standing.numbers()
    standing.take(evaluation(30, None))
    assert "eval not finite" in standing.numbers()


def test_evaluation_of_the_last_step_is_in_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source()
    lines = PlainLines(LiveStatus(), source, "title")
    source.events = [FACTS, *steps(1, 30), evaluation(30, 1.3278), *steps(31, 100)]
    lines.tick(0)
    lines.line()  # while the last step is evaluated
    source.events = [evaluation(100, 0.8355)]
    lines.finish()
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 100/100")]
    assert ["eval 0.8355  " in line for line in shown] == [False, True]


def test_diverging_loss_is_noticed_once(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source()
    lines = PlainLines(LiveStatus(), source, "title")
    source.events = [FACTS, *steps(1, 20), *(event | {"loss": 548.0} for event in steps(21, 40))]
    lines.tick(0)
    source.events = [event | {"loss": 600.0} for event in steps(41, 60)]
    lines.tick(0)
    assert capsys.readouterr().err.count("note: the loss diverges: about 548 up to step") == 1


def test_what_a_worker_says_once_is_shown_and_its_repetitions_are_not(capsys) -> None:
    source = Source()
    lines = PlainLines(LiveStatus(), source, "title")
    message = "step 1: the reward of 16 of 16 answers failed, and it counts as 0: no field 'target'"
    source.events = [FACTS, {"kind": "log", "t": 0, "message": message, "notice": True}]
    source.events += [*steps(1, 2), {"kind": "log", "t": 0, "message": message.replace("step 1", "step 2")}]
    lines.tick(0)
    said = capsys.readouterr().err
    assert said.count(f"note: {message}") == 1
    assert "step 2: the reward" not in said


def test_plain_lines_do_not_repeat_how_far_a_reference_is(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source()
    lines = PlainLines(LiveStatus(), source, "title")
    for done in (8, 16, 16):
        source.events = [{"kind": "reference", "t": 0, "of": "reference", "done": done, "total": 16}]
        lines.tick(0)
        lines.line()
    said = [line for line in capsys.readouterr().err.splitlines() if "computed once" in line]
    assert said == [f"reference log-probabilities, computed once: {done} of 16 rows" for done in (8, 16)]


def test_plain_lines_come_when_there_is_something_new(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source()
    lines = PlainLines(LiveStatus(), source, "title")
    source.events = [FACTS, *steps(1, 3)]
    lines.tick(0)
    lines.line()
    lines.line()
    lines.tick(1)
    err = capsys.readouterr().err
    assert err.count("step 3/100") == 1
    assert stopping_line(1) in err
    assert "\x1b" not in err


def test_title_has_the_number_of_nodes(recipe, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = new_run(recipe(), tmp_path, name="r", workers=2, nodes=2)
    for nodes, title in ((1, "r  2 workers on cpu"), (2, "r  2 workers on cpu, 2 nodes")):
        with open_view(attempt.model_copy(update={"nodes": nodes}), quiet=False):
            pass
        assert title in capsys.readouterr().err.splitlines()


def test_numbers_are_shortened() -> None:
    assert [count(n) for n in (812, 12_345, 4_560_000, 7e9, 0.5)] == ["812", "12.3k", "4.56M", "7B", "0.5"]
    assert [duration(s) for s in (5, 3661, 90_061)] == ["00:00:05", "01:01:01", "1d 01:01:01"]


def test_folder_that_is_gone_is_shown_once_with_the_step_reached(capsys, monkeypatch) -> None:
    """Nothing is read from the folder meanwhile; what is recorded about it is not repeated when it is back."""
    source, status = Source(), LiveStatus()
    lines = PlainLines(status, source, "a")
    source.events = [FACTS, *steps(1, 3)]
    lines.tick(0)
    text = "the run's folder runs/a is gone; training continues"
    monkeypatch.setattr(source, "poll", lambda: pytest.fail("the folder is not read"))
    for step in (4, 7):
        lines.report_storage(text, step)
        lines.tick(0)
    lines.line()
    lines.report_storage(stopping := "saving where it can, and stopping", 7)
    lines.tick(0)
    monkeypatch.undo()
    lines.report_storage(None, 8)
    back = {"kind": "storage", "t": 0, "text": "the run's folder is back"}
    source.events = [{"kind": "storage", "t": 0, "text": text}, *steps(4, 8), back]
    lines.tick(0)
    lines.line()
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in shown if line.startswith("note:")] == [
        f"note: {text}",
        f"note: {stopping}",
        "note: the run's folder is back",
    ]
    assert "step 7/100  (numbers follow when the folder works again)" in shown
    assert shown[-1].startswith("step 8/100  loss 4.92")
