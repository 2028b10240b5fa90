"""The pure parts of the fault matrix: fault plans, recovery times, oracles."""

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventually import CEILING_S, eventually
from headway.chaos.cases import CASES, CaseContext, FaultCase, make_context, select_cases
from headway.chaos.process_tree import held_resources, track_descendants
from headway.chaos.random_faults import KINDS, count_kinds, draw_fault_plan, steps_needed
from headway.chaos.recovery_times import agent_messages, lost_s, measure, median_step_s, oracle_violations
from headway.chaos.torchrun_baseline import COMPARABLE, BaselineRun, baseline_outcome
from headway.errors import RecipeError, UsageError
from headway.recipe import Checkpoint, FaultPlan, Recipe, with_settings
from headway.recipe.faults import AGENT, KEEPER
from headway.rl.sandbox import why_no_sandbox
from headway.state.tiers import tiers_at
from headway.track import Header, Record, RunComparison

BY_NAME = {case.name: case for case in CASES}
S = 10**9


# -- cases

contexts = st.builds(
    CaseContext,
    workers=st.integers(1, 9),
    steps=st.integers(6, 400),
    batch=st.integers(1, 64),
    disk_every=st.integers(0, 50),
    memory_every=st.integers(0, 5),
    step_s=st.floats(0, 2),
)


@given(contexts, st.sampled_from(CASES))
def test_faults_have_an_existing_step_and_worker(context: CaseContext, case: FaultCase) -> None:
    try:
        faults = case.plan(context).faults
    except RecipeError:
        assert case.name == "full-disk", "the only case that needs a save to disk"
        return
    assert bool(faults) != (case.signal is not None), "a fault from within or a signal from outside"
    for fault in faults:
        assert fault.step is None or 1 < fault.step <= context.steps
        assert fault.rank in (None, AGENT, KEEPER, *range(context.workers))
        assert FaultPlan.model_validate_json(FaultPlan(faults=(fault,)).model_dump_json()).faults == (fault,)


@given(contexts)
def test_faults_in_saves_fire_at_a_save(context: CaseContext) -> None:
    """By the rule that trainer and agent themselves use."""
    rules = Checkpoint(every_steps=context.disk_every, memory_every_steps=context.memory_every)
    due = [step for step in range(context.step, context.steps) if tiers_at(rules, step)]
    assert context.saved == (due[0] if due else context.steps)
    disk = [step for step in range(context.step, context.steps) if "disk" in tiers_at(rules, step)]
    if disk:
        assert context.on_disk == disk[0]
    else:
        with pytest.raises(RecipeError, match="no save to disk"):
            _ = context.on_disk


def test_cases_are_unique_and_selected_by_name() -> None:
    assert len(BY_NAME) == len(CASES)
    policies = {case.name for case in CASES if case.policy}
    assert [case.name for case in select_cases("all", 2)] == [name for name in BY_NAME if name not in policies]
    sandboxes = {case.name for case in CASES if case.sandbox and why_no_sandbox()}
    assert [case.name for case in select_cases("all", 2, policy=True)] == [
        name for name in BY_NAME if name not in sandboxes
    ]
    with pytest.raises(UsageError, match="kill-scorer needs a recipe of reinforcement learning"):
        select_cases("kill-scorer", 2)
    assert [case.name for case in select_cases("stop-agent, kill-worker", 1)] == ["stop-agent", "kill-worker"]
    single_worker = {case.name for case in select_cases("all", 1)} | policies
    multi_node = {name for name, case in BY_NAME.items() if case.nodes > 1}
    assert set(BY_NAME) - single_worker == {"hang-collective", "slow-rank", "flipped-bit"} | multi_node
    assert set(BY_NAME) - {case.name for case in select_cases("all", 3)} == {"flipped-bit"} | policies
    with pytest.raises(UsageError, match="unknown fault 'kill-wroker'") as error:
        select_cases("kill-wroker", 2)
    assert "kill-worker" in str(error.value.hint)
    with pytest.raises(UsageError, match="flipped-bit needs an even number of workers, not 3"):
        select_cases("flipped-bit", 3)
    assert set(COMPARABLE) <= set(BY_NAME)


def test_exit_statuses_of_launchers() -> None:
    assert BY_NAME["kill-worker"].statuses == (0,)
    assert BY_NAME["sigterm"].statuses == BY_NAME["sigusr1"].statuses == (75, 0)
    assert BY_NAME["kill-agent-and-keeper"].statuses == (-9, 0)
    assert BY_NAME["same-error"].statuses == (1,)


def test_settings_of_every_case_make_a_recipe() -> None:
    values = {"data": {"path": "x"}, "train": {"steps": 90}, "checkpoint": {"every_steps": 10}}
    recipe = Recipe.model_validate(values)
    policy = Recipe.model_validate({**values, "objective": {"kind": "grpo"}, "rl": {"rewards": ["math"]}})
    context = make_context(recipe, 2, step_s=0.02)
    for case in CASES:
        changed = with_settings(policy if case.policy else recipe, case.settings(context))
        assert changed.train.steps >= 90
        case.plan(make_context(changed, 2, step_s=0.02))
    slow = BY_NAME["slow-rank"]
    steps = with_settings(recipe, slow.settings(context)).train.steps
    left = steps - replace(context, steps=steps).step
    assert left * 0.02 * 1.3 >= 8 - 0.03, "two straggler checks of an agent fit into the rest"
    assert slow.plan(context).faults[0].seconds == pytest.approx(0.3 * 0.02)


def test_context_needs_enough_steps_and_known_saves() -> None:
    recipe = Recipe.model_validate({"data": {"path": "x"}, "train": {"steps": 5}, "checkpoint": {"every_steps": 1}})
    with pytest.raises(RecipeError, match=r"train\.steps is 5: too few"):
        make_context(recipe, 2)
    with pytest.raises(RecipeError, match=r"checkpoint\.every_steps is auto"):
        make_context(with_settings(recipe, ["train.steps=60", "checkpoint.every_steps=auto"]), 2)


# -- random faults

draws = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "count": st.integers(0, 60),
        "workers": st.integers(1, 8),
        "saved_every": st.integers(0, 7),
        "disk_every": st.integers(0, 30),
        "replicas": st.booleans(),
    }
)


@given(draws)
def test_drawn_faults_depend_on_the_seed_only_and_stay_within_bounds(draw: dict[str, Any]) -> None:
    drawn = draw_fault_plan(**draw)
    assert draw_fault_plan(**draw) == drawn
    assert len(drawn.faults) == draw["count"]
    assert sum(count_kinds(drawn).values()) == draw["count"]
    steps = [fault.step or 0 for fault in drawn.faults]
    assert all(later - earlier >= 4 for earlier, later in pairwise(steps))
    assert all(8 < step < steps_needed(drawn) for step in steps)
    deaths = [index for index, fault in enumerate(drawn.faults) if (fault.action, fault.rank) == ("kill", AGENT)]
    assert all(later - earlier > 4 for earlier, later in pairwise(deaths)), "a launcher must not give up"
    for fault in drawn.faults:
        assert fault.attempt is None, "each fires once, in whatever attempt"
        assert not fault.always
        assert fault.rank in (None, AGENT, *range(draw["workers"]))
        assert (fault.rank == AGENT) == (fault.point in ("watch", "write"))
        if fault.action == "full-disk":
            assert fault.step % draw["disk_every"] == 0
        if fault.point in ("save", "saved"):
            assert fault.step % draw["saved_every"] == 0
        assert fault.action != "flip" or draw["replicas"]


def test_drawn_faults_mix_all_kinds() -> None:
    options: dict[str, Any] = {"workers": 2, "saved_every": 1, "disk_every": 25, "replicas": True}
    many = draw_fault_plan(3, 1500, **options)
    assert set(count_kinds(many)) == {kind.name for kind in KINDS}
    actions = Counter(fault.action for fault in many.faults)
    assert actions["hang"] < 0.06 * 1500, "few hang: each takes seconds"
    assert {fault.rank for fault in many.faults} == {None, AGENT, 0, 1}
    assert draw_fault_plan(4, 50, **options) != draw_fault_plan(3, 50, **options)
    assert draw_fault_plan(3, 50, **options).faults == many.faults[:50], "more faults begin with the same ones"


# -- recovery times, on records made by hand


def record(process: str, attempt: int, mono: int, *events: tuple[float, str, dict[str, Any]]) -> Record:
    """The record of a process that started at `mono`; events at seconds on the machine's clock."""
    timed = [{"kind": kind, "t": round(at * S) - mono * S, **fields} for at, kind, fields in events]
    return Record(Header(attempt, process, wall=1.0 + mono, mono=mono * S, boot="b"), timed)


def step(at: float, number: int) -> tuple[float, str, dict[str, Any]]:
    """A step of half a second that ended then."""
    phases = {"data": 0, "compute": S // 2}
    return (
        at,
        "step",
        {"step": number, "chain": f"chain {number}", "loss": 1.0, "grad_norm": 1.0, "cursor": 0, **phases},
    )


START = {"workers": 1, "device": "cpu", "from_step": 0}
KILLED = [
    # The fault fires at 102.2; the step under way still ends, and is discarded.
    record("agent", 1, 90, (100, "attempt", START), (102.75, "exit", {"rank": 0, "code": -9}),
           (103, "end", {"outcome": "failed", "reason": "worker 0 died", "recovery": "resuming from step 3"})),
    record("rank-0", 1, 95, (100, "resumed", {"step": 0}), step(100.5, 1), step(101, 2), step(102, 3), step(102.8, 4)),
    record("agent", 2, 103, (103, "attempt", START | {"from_step": 3}), (103, "begin", {"name": "startup"}),
           (106, "end-span", {"name": "startup"}), (108, "checkpoint", {"step": 5, "digest": "d"}),
           (108, "exit", {"rank": 0, "code": 0}), (108, "end", {"outcome": "finished", "reason": "all steps done"})),
    record("rank-0", 2, 105, (106, "resumed", {"step": 3}), step(106.5, 4), step(107, 5)),
]  # fmt: skip
FAULT_NS = round(102.2 * S)
EQUAL, OTHER = RunComparison(True, 5, 1), RunComparison(False, 5, 1, step=4, differs=("loss",))


def test_restart_is_measured_from_the_fault_to_the_first_step_of_the_next_attempt() -> None:
    times = measure(KILLED, FAULT_NS, "restarted", ("exit",))
    assert times.noticed_s == pytest.approx(0.55)
    assert times.stepping_s == pytest.approx(4.3), "not to the discarded step of the first attempt"
    assert times.redone == 1
    # rework: step 4 of the first attempt from 102.3 to the exit at 102.75; restart: 102.75 to 103, 103 to 106
    assert times.lost_s == pytest.approx(0.45 + 0.25 + 3.0)
    assert lost_s(KILLED) == times.lost_s


def test_end_of_the_processes_counts_as_noticed_for_resumed_runs() -> None:
    times = measure(KILLED, FAULT_NS, "resumed", (), ended_ns=round(103.2 * S))
    assert times.noticed_s == pytest.approx(1.0)
    assert times.stepping_s == pytest.approx(4.3)


def test_continued_workers_step_in_the_same_attempt() -> None:
    records = [
        record("agent", 1, 90, (99, "woken", {"rank": 1, "text": "an earlier one"}), (103, "hang", {"rank": 0})),
        record("rank-0", 1, 95, step(101, 1), step(102.5, 2), step(103.5, 3), step(104, 4)),
    ]
    times = measure(records, FAULT_NS, "woken", ("hang", "woken"))
    assert (times.noticed_s, times.stepping_s) == (pytest.approx(0.8), pytest.approx(1.3))


def test_longest_gap_is_measured_if_no_step_has_to_wait() -> None:
    steps = [step(90, 1), step(100, 2), step(102, 3), step(102.6, 4), step(103.5, 5), step(104, 6)]
    records = [record("agent", 1, 80, (103, "adopted", {"text": "t"})), record("rank-0", 1, 80, *steps)]
    times = measure(records, FAULT_NS, "unhurt", ("adopted",))
    assert times.noticed_s == pytest.approx(0.8)
    assert times.stepping_s == pytest.approx(0.9), "of the gaps since, not the long one before"
    late = measure([records[0], record("rank-0", 1, 80, *steps[:2], step(102.6, 4))], FAULT_NS, "unhurt", ("adopted",))
    assert late.stepping_s == pytest.approx(2.6), "the step of the fault counts from the end of the one before"


def test_missing_times_are_none() -> None:
    times = measure(KILLED[:2], FAULT_NS, "restarted", ("hang",))
    assert (times.noticed_s, times.stepping_s) == (None, None)
    refused = measure(KILLED, FAULT_NS, "refused", ("exit",))
    assert (refused.noticed_s, refused.stepping_s) == (pytest.approx(0.55), None)


def test_median_step() -> None:
    steps = [step(100, 1), step(101, 2), step(102.5, 3), step(112.5, 4), step(113.5, 5)]
    assert median_step_s([record("rank-0", 1, 90, *steps)]) == pytest.approx(1.5)  # of 1, 1, 1.5, 10: the upper middle
    assert median_step_s([]) == 0.0


def test_agent_messages_since_the_fault_without_repeats() -> None:
    agent = record(
        "agent", 1, 90, (100, "woken", {"text": "before"}), (103, "hang", {"text": "only a part"}),
        (104, "woken", {"text": "woken"}), (105, "adopted", {"text": "adopted"}), (106, "woken", {"text": "woken"}),
        (107, "unsaved", {"message": "disk full"}), (108, "straggler", {"text": "slow"}),
        (109, "end", {"outcome": "failed", "reason": "why", "recovery": "what is done"}),
    )  # fmt: skip
    ends = record("agent", 2, 110, (111, "end", {"outcome": "failed", "reason": "why it is over"}))
    last = record("agent", 3, 112, (113, "end", {"outcome": "finished", "reason": "all steps done"}))
    messages = ["woken", "adopted", "disk full", "slow", "what is done", "why it is over"]
    assert agent_messages([last, agent, ends], FAULT_NS) == messages


# -- the oracle


def violations(case: str, records: list[Record] = KILLED, **changed: Any) -> list[str]:
    facts: dict[str, Any] = {"statuses": [0], "fault_ns": FAULT_NS, "rank": 0, "steps": 5, "against": EQUAL}
    return oracle_violations(BY_NAME[case], records, **facts | changed)


def test_run_that_meets_its_oracle_has_no_violations() -> None:
    assert violations("kill-worker") == []


@pytest.mark.parametrize(
    ("case", "changed", "violation"),
    [
        ("kill-worker", {"statuses": [1]}, "its launchers exited with status 1, not status 0"),
        ("kill-worker", {"statuses": [None]}, "its launchers exited with no exit in time, not status 0"),
        ("sigterm", {"statuses": [0]}, "its launchers exited with status 0, not status 75, then status 0"),
        ("kill-agent", {}, "2 attempts, not 1"),
        ("fault-in-recovery", {}, "2 attempts, not 3"),
        ("hang-data", {}, "not noticed: no hang event"),
        ("kill-worker", {"fault_ns": 109 * S}, "not noticed: no exit event"),
        ("kill-worker", {"against": OTHER}, "they diverge at step 4: loss differ"),
        ("kill-worker", {"against": None}, "there is no unfaulted run to compare with"),
        ("kill-worker", {"steps": 6}, "it reached step 5 of 6"),
        ("same-error", {"statuses": [1]}, "the reason does not say why: 'all steps done'"),
    ],
)
def test_violations_of_an_oracle_are_listed(case: str, changed: dict[str, Any], violation: str) -> None:
    assert violation in violations(case, **changed)


def test_unsaved_last_state_is_a_violation() -> None:
    records = [replace(r, events=[e for e in r.events if e["kind"] != "checkpoint"]) for r in KILLED]
    assert violations("kill-worker", records) == ["its last state was not saved"]


def test_naming_another_worker_is_a_violation() -> None:
    hangs = [record("agent", 2, 100, (103, "hang", {"rank": rank})) for rank in (0, 1)]
    assert violations("hang-data", [*KILLED, hangs[0]]) == []
    assert violations("hang-data", [*KILLED, *hangs]) == ["worker 1 was named for worker 0"]


def test_refusal_must_say_why_and_needs_no_reference() -> None:
    end = {"outcome": "failed", "reason": "worker 0 failed: the same error at the same place a second time"}
    records = [*KILLED[:2], record("agent", 2, 104, (105, "end", end))]
    assert violations("same-error", records, statuses=[1], against=None) == []


# -- torchrun


def events(*timed: tuple[float, str]) -> list[dict[str, Any]]:
    return [{"kind": kind, "at_ns": round(at * S)} for at, kind in timed]


def test_outcome_of_a_torchrun_try() -> None:
    before = events((90, "start"), (100, "step"), (102.3, "step"))
    after = events((104.2, "start"), (107.2, "step"), (107.3, "step"), (107.4, "step"))
    now = 108 * S
    assert baseline_outcome(before + after, FAULT_NS, now, None) == BaselineRun(
        "recovered", pytest.approx(2.0), pytest.approx(5.0)
    )
    assert baseline_outcome(before + after[:-1], FAULT_NS, now, None) is None, "two steps are not enough while it runs"
    assert baseline_outcome(before + after[:-1], FAULT_NS, now, 0) == BaselineRun(
        "recovered", pytest.approx(2.0), pytest.approx(5.0)
    )
    assert baseline_outcome(before + after[:-1], FAULT_NS, now, 1) == BaselineRun("job lost", pytest.approx(2.0))
    assert baseline_outcome(before, FAULT_NS, now, -9) == BaselineRun("job lost", None)
    assert baseline_outcome(before, FAULT_NS, FAULT_NS + 59 * S, None) is None
    assert baseline_outcome(before, FAULT_NS, FAULT_NS + 61 * S, None) == BaselineRun("not in time", None)


# -- leftovers

PARENT = "import subprocess, sys; subprocess.Popen(['sleep', '300']); sys.exit(7)"


def test_orphans_are_found_and_killed_and_no_other_process(tmp_path: Path) -> None:
    older = subprocess.Popen(["sleep", "300"])
    try:
        with track_descendants() as tree:
            parent = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True)
            tree.leave_to_caller(parent.pid)
            eventually(lambda: list(tree.alive().values()) == ["sleep: sleep 300"], tree.alive)
            (orphan,) = tree.alive()
            assert parent.wait() == 7, "its exit status was left to its waiter"
            assert tree.wait(0.1) == {orphan: "sleep: sleep 300"}
            tree.kill()
            assert tree.alive() == {}
            with pytest.raises(ProcessLookupError):
                os.kill(orphan, 0)
            another = subprocess.Popen(["sleep", "300"])
            tree.leave_to_caller(another.pid)
        assert another.wait(CEILING_S) == -signal.SIGKILL, "what is left at the end is killed"
        assert older.poll() is None, "a process from before is not part of the tree"
    finally:
        older.kill()
        older.wait()


def test_held_resources_count_descriptors_and_shared_memory(tmp_path: Path) -> None:
    before = held_resources(tmp_path)
    memory = os.memfd_create("headway-test")
    (tmp_path / "segment").touch()
    try:
        now = held_resources(tmp_path)
        assert now.descriptors == before.descriptors + 1
        assert now.shared - before.shared == {"segment"}
    finally:
        os.close(memory)
    assert held_resources().descriptors == before.descriptors
