"""The verbs that read a run, called as the command line calls them."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from headway.cli.compare import compare
from headway.cli.diff import diff
from headway.cli.logs import logs
from headway.cli.metrics import metrics
from headway.cli.report import report
from headway.cli.runs import runs
from headway.errors import RunError, UsageError
from headway.recipe import Data, Recipe, Train
from headway.track import (
    START,
    Recorder,
    RunFolder,
    RunPlan,
    create_run,
    export_tensorboard,
    extend_chain,
    lock_run,
    read_plan,
    record_path,
    write_plan,
)

app = typer.Typer()
for verb in (runs, report, metrics, logs, diff, compare):
    app.command()(verb)

S = 10**9


def widest(lines: list[str]) -> int:
    """Length of the longest line besides the command at the end, which is not broken."""
    return max(len(line) for line in lines if not line.startswith("next: "))


def call(root: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--runs", str(root)])


def make_run(root: Path, name: str, *, loss: float = 4.0, attempts: int = 1, peak: float | None = 1e4) -> RunFolder:
    """Each attempt: 10 s, 2 workers, 2 s of start-up, 3 steps of 2 s; the later one goes back one step."""
    run, link, first = create_run(root, "demo", name), START, 1
    for attempt in range(1, attempts + 1):
        last_words = attempt == attempts
        options = {"attempt": attempt, "clock": lambda: 7, "wall": lambda a=attempt: 1e9 + 100 * a}
        with Recorder(record_path(run.events, attempt, "agent"), process="agent", **options) as agent:
            agent.event("attempt", at=7, workers=2, device="cpu", from_step=first - 1, recipe_changes={})
            if not last_words:
                agent.event("exit", at=9 * S + 7, rank=1, code=-9)
            outcome = "finished" if last_words else "failed"
            agent.event("end", at=10 * S + 7, outcome=outcome, reason="because")
        for rank in range(2):
            with Recorder(
                record_path(run.events, attempt, f"rank-{rank}"), process=f"rank-{rank}", **options
            ) as worker:
                worker.event("begin", at=7, name="startup")
                worker.event("end-span", at=2 * S + 7, name="startup")
                if rank == 0:
                    worker.event(
                        "facts",
                        flops_per_token=60,
                        flops_per_token_full_attention=90,
                        peak_flops=peak,
                        peak_source="made up",
                        total_steps=40,
                    )
                    worker.event("resumed", at=2 * S + 7, step=first - 1)
                for step in range(first, first + 3):
                    fields = {"step": step, "data": S // 2, "compute": 3 * S // 2}
                    if rank == 0:
                        link = extend_chain(link, step, step, loss, 1.0)
                        fields |= {"loss": loss, "grad_norm": 1.0, "cursor": step, "tokens": 100, "chain": link}
                    worker.event("step", at=(2 + 2 * (step - first + 1)) * S + 7, **fields)
                if rank == 0:
                    worker.event("checkpoint", at=9 * S, step=first + 2, digest=f"{loss:032}", bytes=1, seconds=0.1)
        first += 2
    return run


def test_runs_lists_newest_first(tmp_path):
    assert "no runs in" in call(tmp_path, "runs").output
    for record in make_run(tmp_path, "one").events.glob("*.jsonl"):
        os.utime(record, ns=(0, 0))
    run = make_run(tmp_path, "two", loss=1.23456, attempts=2)
    with lock_run(run):
        lines = call(tmp_path, "runs").output.splitlines()
        rows = json.loads(call(tmp_path, "runs", "--json").output)
    assert [line.split()[:3] for line in lines[1:3]] == [["two", "running", "5/40"], ["one", "finished", "3/40"]]
    assert lines[1].split()[3:6] == ["1.2346", "2", "cpu"]
    assert lines[1].split()[-1] == "00:00:20"
    assert widest(lines) <= 80
    assert [(row["name"], row["state"], row["step"]) for row in rows] == [("two", "running", 5), ("one", "finished", 3)]


def make_policy(root: Path, name: str) -> RunFolder:
    """Two steps of one worker, with a second of generation before each, that end with a reward of 0.5."""
    run = create_run(root, "demo", name)
    with Recorder(record_path(run.events, 1, "agent"), process="agent", attempt=1, clock=lambda: 0) as agent:
        agent.event("attempt", at=0, workers=1, device="cpu", from_step=0, recipe_changes={})
        agent.event("end", at=9 * S, outcome="finished", reason="done")
    with Recorder(record_path(run.events, 1, "rank-0"), process="rank-0", attempt=1, clock=lambda: 0) as worker:
        worker.event("facts", at=0, flops_per_token=60, peak_flops=1e4, peak_source="made up", total_steps=2)
        for step, reward in ((1, 0.25), (2, 0.5)):
            times = {"data": 2 * S, "compute": S}
            worker.event("begin", at=(4 * step - 3) * S, name="generate")
            worker.event("end-span", at=(4 * step - 2) * S, name="generate")
            worker.event("step", at=4 * step * S, step=step, loss=0.0, reward=reward, tokens=100, **times)
    return run


def test_policy_runs_are_listed_reported_and_compared_by_reward(tmp_path):
    for name in ("policy", "second", "third"):
        make_policy(tmp_path, name)
    make_run(tmp_path, "plain")
    rows = {line.split()[0]: line for line in call(tmp_path, "runs").output.splitlines()}
    assert "reward 0.500" in rows["policy"]
    assert "0.0000" not in rows["policy"]
    assert "4.0000" in rows["plain"]
    text = call(tmp_path, "report", "policy").output
    assert text.splitlines()[-1].startswith("next: headway metrics policy --key reward ")
    assert "MFU: 30.0% during steps without generation, " in text
    assert "next: headway metrics plain --key loss " in call(tmp_path, "report", "plain").output
    for names, key in (("policy second third", "reward"), ("policy second plain", "loss")):
        lines = call(tmp_path, "compare", *names.split()).output
        assert f"next: headway metrics {names} --key {key}" in " ".join(lines.split())


def test_report_shows_the_ledger(tmp_path):
    make_run(tmp_path, "demo")
    result = call(tmp_path, "report", "last")
    assert result.exit_code == 0
    text = result.output
    assert text.splitlines()[0] == "demo  finished, step 3 in 1 attempt, 2 workers x cpu, 00:00:10"
    table = {line[2:20].strip(): line[20:].split() for line in text.splitlines() if line.startswith("  ")}
    assert table["start-up"] == ["4.0", "20.0%"]
    assert table["data stall"] == ["3.0", "15.0%"]
    assert table["compute"] == ["9.0", "45.0%"]
    assert table["unattributed"] == ["4.0", "20.0%"]
    assert table["total"] == ["20.0", "100.0%"]
    # 300 tokens x 60 FLOPs at 10,000 FLOP/s: 1.8 of the 12 device-seconds that the steps took.
    flat = " ".join(text.split())
    assert "useful: 1.8 device-seconds at peak, 9.0% of all (made up)" in flat
    assert "MFU: 15.0% during steps, causal attention counted half; 22.5% counting full attention" in flat
    assert "largest overhead: start-up, 4.0 device-seconds, 20.0%." in text
    assert widest(text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("environment", "compared", "line", "replicas"),
    [
        ('{"mesh": {}}', [], "not detectable on this mesh (no replicas to compare)", [1, 0, None]),
        ('{"mesh": {"shard": 2}}', [], "not detectable on this mesh (no replicas to compare)", [1, 0, None]),
        (
            '{"mesh": {"replicate": 2}}',
            [],
            "replicas were never compared (health.compare_every_steps)",
            [2, 0, None],
        ),
        ('{"mesh": {"replicate": 2}}', [3], "replicas compared 1 time, last at step 3", [2, 1, 3]),
        ('{"mesh": {"replicate": 2, "shard": 1}}', [1, 3], "replicas compared 2 times, last at step 3", [2, 2, 3]),
        ('{"mesh": 3}', [3], None, None),
        ("torn", [3], None, None),
        (None, [3], None, None),
    ],
)
def test_report_says_whether_silent_corruption_is_detectable(tmp_path, environment, compared, line, replicas):
    run = make_run(tmp_path, "demo")
    if environment is not None:
        run.environment_file.write_text(environment)
    with Recorder(record_path(run.events, 1, "rank-0"), process="rank-0", attempt=1) as worker:
        for step in compared:
            worker.event("replicas", step=step, digest="0" * 16)
    text = call(tmp_path, "report", "demo").output
    lines = [row.removeprefix("silent corruption: ") for row in text.splitlines() if row.startswith("silent")]
    assert lines == ([] if line is None else [line])
    document = json.loads(call(tmp_path, "report", "demo", "--json").output)["replicas"]
    keys = ["copies", "compared", "last_step"]
    assert document == (None if replicas is None else dict(zip(keys, replicas, strict=True)))
    assert widest(text.splitlines()) <= 80


def make_plan(**changes: object) -> RunPlan:
    """Two H100s, 1.6 s a step of which half is useful."""
    accounts = {"useful": 0.8, "kernels below peak": 0.797, "recomputation": 0.003, "pipeline bubble": 0.0}
    plan = RunPlan(
        cluster="h100x2x1", chip="h100", assumed=False, fidelity="default", mesh={"shard": 2, "expert": 2}, seq=10,
        batch=10, microbatch=5, recompute="none", precision="bf16", chosen={}, step_s=1.6, accounts_s=accounts,
        tokens_s=62.5, mfu=0.5, mfu_full_attention=0.6, memory_bytes={"weights": 2.0, "logits": 1.0},
        capacity_bytes=4.0,
    )  # fmt: skip
    return plan.model_copy(update=changes)


def test_report_compares_plan_with_measurements(tmp_path):
    run = make_run(tmp_path, "demo")
    assert json.loads(call(tmp_path, "report", "demo", "--json").output)["plan"] is None
    write_plan(run, make_plan())
    assert read_plan(run) == make_plan()
    text = call(tmp_path, "report", "demo").output
    table = {line[2:20].strip(): line[20:].split() for line in text.splitlines() if line.startswith("  ")}
    # Three steps of 1.6 s on two devices are 9.6 of the 20 device-seconds; a step took 0.5 s of data and 1.5 s more.
    assert table["compute"] == ["9.0", "45.0%", "48.0%"]
    assert table["data stall"] == ["3.0", "15.0%", "0.0%"]
    assert table["start-up"] == ["4.0", "20.0%", "-"]
    flat = " ".join(text.split())
    assert "plan: 1.60 s per step, measured 2.00 s (+25.0 %); MFU 50.0%, measured 15.0%" in flat
    assert "planned step: useful 50%, kernels below peak 50% largest overhead" in flat
    assert widest(text.splitlines()) <= 80
    document = json.loads(call(tmp_path, "report", "demo", "--json").output)["plan"]
    assert document["step_s"] == 1.6
    assert document["measured"] == {"steps": 3, "step_s": 2.0, "mfu": 0.15}
    assert document["off"] == pytest.approx(0.25)
    assert document["shares"] == {"compute": pytest.approx(0.48), "data stall": 0.0}


def test_report_of_plan_with_assumed_chip_or_for_last_steps(tmp_path):
    run = make_run(tmp_path, "demo")
    write_plan(run, make_plan(assumed=True, from_step=2))
    text = call(tmp_path, "report", "demo").output
    assert "plan" not in text.rpartition("next: ")[0], "a CPU's speed is assumed, and says nothing about this run"
    assert "48.0%" not in text
    document = json.loads(call(tmp_path, "report", "demo", "--json").output)["plan"]
    assert (document["measured"]["steps"], document["shares"]) == (1, {})
    write_plan(run, make_plan(from_step=3))
    text = call(tmp_path, "report", "demo").output
    assert "plan: 1.60 s per step; MFU" in text
    run.plan_file.write_text("{")
    assert "plan:" not in call(tmp_path, "report", "demo").output


def test_report_shows_incidents_attempts_and_chain(tmp_path):
    run = make_run(tmp_path, "demo", attempts=2, peak=None)
    text = call(tmp_path, "report", "demo").output
    assert "MFU" not in text
    assert "worker 1 was killed by signal 9 after step 3" in text
    assert "resumed after step 2, 1 step to redo" in text
    document = json.loads(call(tmp_path, "report", "demo", "--json").output)
    assert sum(document["accounts_ns"].values()) == document["total_ns"] == 40 * S
    assert (document["steps"], document["lost_steps"], document["mfu"]) == (5, 1, None)
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", "finished"]
    assert document["largest_loss"]["account"] in document["accounts_ns"]
    assert document["exact"]["step"] == document["exact"]["digest_step"] == 5
    last = json.loads(record_path(run.events, 2, "rank-0").read_text().splitlines()[-2])
    assert document["exact"]["chain"] == last["chain"]
    assert f"exact: chain {last['chain']} at step 5" in text
    assert widest(text.splitlines()) <= 80


def test_report_of_run_without_records(tmp_path):
    create_run(tmp_path, "demo", "demo")
    result = call(tmp_path, "report", "demo")
    assert result.exit_code == 0
    assert "interrupted, step 0 in 0 attempts" in result.output
    assert "next: headway logs " in result.output, "no step, no metrics"


def test_metrics_prints_steps_and_values(tmp_path):
    make_run(tmp_path, "demo", attempts=2)
    assert call(tmp_path, "metrics", "demo").output == "".join(f"{step} 4\n" for step in range(1, 6))
    document = json.loads(call(tmp_path, "metrics", "demo", "--key", "step_s", "--json").output)
    assert document == {"run": "demo", "key": "step_s", "steps": [1, 2, 3, 4, 5], "values": [2.0] * 5}
    assert isinstance(call(tmp_path, "metrics", "demo", "--key", "nope").exception, UsageError)


def test_metrics_with_a_common_prefix_are_columns(tmp_path):
    run = create_run(tmp_path, "demo", "demo")
    with Recorder(record_path(run.events, 1, "rank-0"), process="rank-0", attempt=1) as recorder:
        recorder.event("step", step=1, loss=4.0, **{"ratio/0-0.5": 0.125})
        recorder.event("step", step=2, loss=4.0, **{"ratio/0-0.5": 0.25, "ratio/0.5-inf": 0.75})
    rows = [line.split() for line in call(tmp_path, "metrics", "demo", "--key", "ratio/").output.splitlines()]
    assert rows == [["step", "0-0.5", "0.5-inf"], ["1", "0.125"], ["2", "0.25", "0.75"]]
    document = json.loads(call(tmp_path, "metrics", "demo", "--key", "ratio/", "--json").output)
    assert document["values"]["ratio/0.5-inf"] == [None, 0.75]
    assert isinstance(call(tmp_path, "metrics", "demo", "--key", "nope/").exception, UsageError)


needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the optional tensorboard package is not installed"
)


@needs_tensorboard
def test_tensorboard_export_round_trips(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_run(tmp_path, "demo", attempts=2)
    result = call(tmp_path, "metrics", "demo", "--tensorboard", str(tmp_path / "board"))
    assert result.exit_code == 0
    reader = EventAccumulator(str(tmp_path / "board" / "demo"), size_guidance={"scalars": 0})
    reader.Reload()
    scalars = {"loss", "grad_norm", "tokens", "cursor", "step_s", "data_s", "tokens_per_s", "mfu"}
    assert set(reader.Tags()["scalars"]) == scalars
    losses = reader.Scalars("loss")
    assert [(event.step, event.value) for event in losses] == [(step, 4.0) for step in range(1, 6)]
    # Steps 1 and 2 stand as attempt 1 did them, 3 as attempt 2 did: 4 s after its opening.
    assert [event.wall_time for event in losses[:3]] == [1e9 + 100 + 4, 1e9 + 100 + 6, 1e9 + 200 + 4]


@needs_tensorboard
def test_tensorboard_export_imports_neither_torch_nor_tensorflow(tmp_path):
    run = make_run(tmp_path, "demo")
    code = f"""
import sys
from pathlib import Path
from headway.track import RunFolder, export_tensorboard
export_tensorboard(RunFolder(Path({str(run.path)!r})), Path({str(tmp_path / "board")!r}))
assert not {{"torch", "tensorflow"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_missing_tensorboard_hints_at_installation(tmp_path, monkeypatch):
    run = make_run(tmp_path, "demo")
    for name in ["tensorboard", *(name for name in sys.modules if name.startswith("tensorboard."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as caught:
        export_tensorboard(run, tmp_path / "board")
    assert caught.value.hint == "pip install 'headway[tensorboard]'"


def test_logs_shows_files_of_last_attempt(tmp_path):
    run = create_run(tmp_path, "demo", "demo")
    assert isinstance(call(tmp_path, "logs", "demo").exception, RunError)
    for name, text in {
        "0001-rank-0": "old\n",
        "0002-rank-0": "a\nb",
        "0002-rank-1": "c\n",
        "0002-agent": "d\n",
    }.items():
        (run.logs / f"{name}.log").write_text(text)
    assert call(tmp_path, "logs", "demo").output == (
        "== 0002-agent.log\nd\n== 0002-rank-0.log\na\nb\n== 0002-rank-1.log\nc\n"
    )
    assert call(tmp_path, "logs", "demo", "--rank", "0").output == "a\nb\n"
    assert call(tmp_path, "logs", "demo", "--rank", "0", "--attempt", "1").output == "old\n"
    rows = [json.loads(line) for line in call(tmp_path, "logs", "demo", "--rank", "1", "--json").output.splitlines()]
    assert rows == [{"file": "0002-rank-1.log", "line": "c"}]
    assert isinstance(call(tmp_path, "logs", "demo", "--rank", "7").exception, RunError)


def test_logs_shows_agent_output_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    run = create_run(tmp_path, "demo", "demo")
    start = {"kind": "attempt", "t": 10**9, "workers": 2, "device": "cpu", "from_step": 0, "nodes": 2}
    lost = "node n1 was lost: its agent is gone"
    for number, events in enumerate(
        [
            [start, {"kind": "waiting", "t": 2 * 10**9, "text": "waiting for rank 1 of 2"}, {"kind": "alive", "t": 1}],
            [
                start | {"workers": 1, "from_step": 5},
                {"kind": "end", "t": 60 * 10**9, "outcome": "failed", "reason": lost},
            ],
        ],
        start=1,
    ):
        lines = [{"kind": "open", "format": 1, "attempt": number, "process": "agent", "wall": 0.0}, *events]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.events / f"{number:04d}-agent.jsonl").write_text(text + '{"kind": "to')
        (run.logs / f"{number:04d}-rank-0.log").write_text("said\n")
    first = "== 0001-agent.jsonl\n00:00:01 2 workers on cpu, 2 nodes\n00:00:02 waiting for rank 1 of 2\n"
    second = f"== 0002-agent.jsonl\n00:00:01 1 worker on cpu, 2 nodes, from step 5\n00:01:00 failed: {lost}\n"
    assert call(tmp_path, "logs", "demo").output == f"{first}{second}== 0002-rank-0.log\nsaid\n"
    assert call(tmp_path, "logs", "demo", "--attempt", "1").output == f"{first}== 0001-rank-0.log\nsaid\n"
    assert call(tmp_path, "logs", "demo", "--rank", "0").output == "said\n"
    (run.logs / "0002-keeper.log").write_text("all that it said\n")
    assert call(tmp_path, "logs", "demo").output == "== 0002-keeper.log\nall that it said\n== 0002-rank-0.log\nsaid\n"
    monkeypatch.undo()
    time.tzset()


def test_logs_follow_until_the_run_ends(tmp_path):
    run = create_run(tmp_path, "demo", "demo")
    held, go_on = threading.Event(), threading.Event()

    def live() -> None:
        with lock_run(run):
            (run.logs / "0001-rank-0.log").write_text("first\nhal")
            held.set()
            go_on.wait(5)
            with (run.logs / "0001-rank-0.log").open("a") as file:
                file.write("f\nlast words")

    thread = threading.Thread(target=live)
    thread.start()
    held.wait(5)
    threading.Timer(0.4, go_on.set).start()
    result = call(tmp_path, "logs", "demo", "--rank", "0", "--follow")
    thread.join()
    assert result.output == "first\nhalf\nlast words\n"


def test_diff_exits_0_when_equal_else_1(tmp_path):
    make_run(tmp_path, "a")
    make_run(tmp_path, "b")
    make_run(tmp_path, "c", loss=4.5)
    same = call(tmp_path, "diff", "a", "b")
    assert (same.exit_code, same.output) == (0, "a and b: equal: 3 common steps, 1 common checkpoints\n")
    other = call(tmp_path, "diff", "a", "c", "--json")
    assert other.exit_code == 1
    document = json.loads(other.output)
    assert (document["runs"], document["equal"], document["step"], document["differs"]) == (
        ["a", "c"],
        False,
        1,
        ["loss"],
    )
    assert document["first"] == {"step": 1, "metric": "loss", "values": [4.0, 4.5]}
    lines = call(tmp_path, "diff", "a", "c").output.splitlines()
    assert lines[0].startswith("cause: none in recipe, data, workers or environment")
    first = lines.index("first: loss of step 1: 4.0 in a, 4.5 in c")  # a cause may take two lines
    assert "diverge at step 1" in lines[first + 1]


def test_diff_names_the_cause_first(tmp_path):
    for name, lr, loss in (("a", 0.1, 4.0), ("c", 0.2, 4.5)):
        run = make_run(tmp_path, name, loss=loss)
        recipe = Recipe(data=Data(path="d"), train=Train(lr=lr))
        run.recipe_file.write_text(recipe.model_dump_json())
        run.environment_file.write_text(json.dumps({"packages": {"torch": f"2.{lr}"}, "data_version": name * 8}))
    assert call(tmp_path, "diff", "a", "c").output.splitlines()[:3] == [
        "cause: train.lr: 0.1 in a, 0.2 in c",
        "       data version: aaaaaaaa in a, cccccccc in c",
        "       environment torch: 2.0.1 in a, 2.0.2 in c",
    ]
    document = json.loads(call(tmp_path, "diff", "a", "c", "--json").output)
    assert document["causes"][0] == {"kind": "recipe", "key": "train.lr", "values": [0.1, 0.2]}
