"""The pure parts of the fault matrix: what is planned, what is measured, what counts as met."""

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
from headway.chaos import CASES, FaultCase, select_cases, track_descendants
from headway.chaos.cases import CaseContext, scene_of
from headway.chaos.process_tree import belongings
from headway.chaos.random_faults import KINDS, count_kinds, draw_fault_plan, steps_needed
from headway.chaos.recovery_times import lost_s, measure, median_step_s, oracle_violations, said
from headway.chaos.torchrun_baseline import ANSWERS, BaselineRun, judge
from headway.errors import RecipeError, UsageError
from headway.recipe import Checkpoint, FaultPlan, Recipe, with_settings
from headway.recipe.faults import AGENT, KEEPER
from headway.state.tiers import tiers_at
from headway.track import Header, Record, RunComparison

BY_NAME = {row.name: row for row in CASES}
S = 10**9


# -- rows

scenes = st.builds(
    CaseContext,
    workers=st.integers(1, 9),
    steps=st.integers(6, 400),
    batch=st.integers(1, 64),
    disk_every=st.integers(0, 50),
    memory_every=st.integers(0, 5),
    step_s=st.floats(0, 2),
)


@given(scenes, st.sampled_from(CASES))
def test_every_plan_strikes_a_step_and_a_worker_that_there_are(scene: CaseContext, row: FaultCase) -> None:
    try:
        faults = row.plan(scene).faults
    except RecipeError:
        assert row.name == "full-disk", "only that one needs a save to disk"
        return
    assert bool(faults) != (row.signal is not None), "something strikes, from within or from outside"
    for fault in faults:
        assert fault.step is None or 1 < fault.step <= scene.steps
        assert fault.rank in (None, AGENT, KEEPER, *range(scene.workers))
        assert FaultPlan.model_validate_json(FaultPlan(faults=(fault,)).model_dump_json()).faults == (fault,)


@given(scenes)
def test_faults_in_saves_strike_where_a_save_is(scene: CaseContext) -> None:
    """By what trainer and agent themselves ask when something is saved."""
    rules = Checkpoint(every_steps=scene.disk_every, memory_every_steps=scene.memory_every)
    due = [step for step in range(scene.step, scene.steps) if tiers_at(rules, step)]
    assert scene.saved == (due[0] if due else scene.steps)
    disk = [step for step in range(scene.step, scene.steps) if "disk" in tiers_at(rules, step)]
    if disk:
        assert scene.on_disk == disk[0]
    else:
        with pytest.raises(RecipeError, match="no save to disk"):
            _ = scene.on_disk


def test_rows_are_told_apart_and_asked_for_by_name() -> None:
    assert len(BY_NAME) == len(CASES)
    assert [row.name for row in select_cases("all", 2)] == [row.name for row in CASES]
    assert [row.name for row in select_cases("stop-agent, kill-worker", 1)] == ["stop-agent", "kill-worker"]
    alone = {row.name for row in select_cases("all", 1)}
    of_nodes = {name for name, row in BY_NAME.items() if row.nodes > 1}
    assert set(BY_NAME) - alone == {"hang-collective", "slow-rank", "flipped-bit"} | of_nodes
    assert set(BY_NAME) - {row.name for row in select_cases("all", 3)} == {"flipped-bit"}
    with pytest.raises(UsageError, match="no fault 'kill-wroker'") as error:
        select_cases("kill-wroker", 2)
    assert "kill-worker" in str(error.value.hint)
    with pytest.raises(UsageError, match="flipped-bit needs an even number of workers, not 3"):
        select_cases("flipped-bit", 3)
    assert set(ANSWERS) <= set(BY_NAME)


def test_what_keepers_must_exit_with() -> None:
    assert BY_NAME["kill-worker"].statuses == (0,)
    assert BY_NAME["sigterm"].statuses == BY_NAME["sigusr1"].statuses == (75, 0)
    assert BY_NAME["kill-agent-and-keeper"].statuses == (-9, 0)
    assert BY_NAME["same-error"].statuses == (1,)


def test_the_settings_of_every_row_make_a_recipe() -> None:
    recipe = Recipe.model_validate({"data": {"path": "x"}, "train": {"steps": 90}, "checkpoint": {"every_steps": 10}})
    scene = scene_of(recipe, 2, step_s=0.02)
    for row in CASES:
        changed = with_settings(recipe, row.settings(scene))
        assert changed.train.steps >= 90
        row.plan(scene_of(changed, 2, step_s=0.02))
    slow = BY_NAME["slow-rank"]
    steps = with_settings(recipe, slow.settings(scene)).train.steps
    left = steps - replace(scene, steps=steps).step
    assert left * 0.02 * 1.3 >= 8 - 0.03, "two looks of an agent fit into what is left"
    assert slow.plan(scene).faults[0].seconds == pytest.approx(0.3 * 0.02)


def test_a_scene_needs_steps_and_saves_that_are_known() -> None:
    recipe = Recipe.model_validate({"data": {"path": "x"}, "train": {"steps": 5}, "checkpoint": {"every_steps": 1}})
    with pytest.raises(RecipeError, match="a run of 5 steps is over before"):
        scene_of(recipe, 2)
    with pytest.raises(RecipeError, match="saves at any"):
        scene_of(with_settings(recipe, ["train.steps=60", "checkpoint.every_steps=auto"]), 2)


# -- chance

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
def test_chance_is_the_same_for_a_seed_and_stays_within_its_bounds(draw: dict[str, Any]) -> None:
    drawn = draw_fault_plan(**draw)
    assert draw_fault_plan(**draw) == drawn
    assert len(drawn.faults) == draw["count"]
    assert sum(count_kinds(drawn).values()) == draw["count"]
    steps = [fault.step or 0 for fault in drawn.faults]
    assert all(later - earlier >= 4 for earlier, later in pairwise(steps))
    assert all(8 < step < steps_needed(drawn) for step in steps)
    deaths = [place for place, fault in enumerate(drawn.faults) if (fault.action, fault.rank) == ("kill", AGENT)]
    assert all(later - earlier > 4 for earlier, later in pairwise(deaths)), "keepers are not driven to despair"
    for fault in drawn.faults:
        assert fault.attempt is None, "each strikes once, whatever attempt it is"
        assert not fault.always
        assert fault.rank in (None, AGENT, *range(draw["workers"]))
        assert (fault.rank == AGENT) == (fault.point in ("watch", "write"))
        if fault.action == "full-disk":
            assert fault.step % draw["disk_every"] == 0
        if fault.point in ("save", "saved"):
            assert fault.step % draw["saved_every"] == 0
        assert fault.action != "flip" or draw["replicas"]


def test_chance_mixes_all_kinds_and_follows_its_seed() -> None:
    options: dict[str, Any] = {"workers": 2, "saved_every": 1, "disk_every": 25, "replicas": True}
    many = draw_fault_plan(3, 1500, **options)
    assert set(count_kinds(many)) == {kind.name for kind in KINDS}
    actions = Counter(fault.action for fault in many.faults)
    assert actions["hang"] < 0.06 * 1500, "few hang: each takes seconds"
    assert {fault.rank for fault in many.faults} == {None, AGENT, 0, 1}
    assert draw_fault_plan(4, 50, **options) != draw_fault_plan(3, 50, **options)
    assert draw_fault_plan(3, 50, **options).faults == many.faults[:50], "more faults go on where fewer end"


# -- measuring, on records made by hand


def record(process: str, attempt: int, mono: int, *events: tuple[float, str, dict[str, Any]]) -> Record:
    """What a process wrote whose clock began at a moment; events at seconds on the machine's clock."""
    told = [{"kind": kind, "t": round(at * S) - mono * S, **fields} for at, kind, fields in events]
    return Record(Header(attempt, process, wall=1.0 + mono, mono=mono * S, boot="b"), told)


def step(at: float, number: int) -> tuple[float, str, dict[str, Any]]:
    """A step that ended then, after half a second."""
    took = {"data": 0, "compute": S // 2}
    return at, "step", {"step": number, "chain": f"chain {number}", "loss": 1.0, "grad_norm": 1.0, "cursor": 0, **took}


START = {"workers": 1, "device": "cpu", "from_step": 0}
KILLED = [
    # It strikes at 102.2; the step that was under way then ends all the same, and is thrown away.
    record("agent", 1, 90, (100, "attempt", START), (102.75, "exit", {"rank": 0, "code": -9}),
           (103, "end", {"outcome": "failed", "reason": "worker 0 died", "recovery": "resuming from step 3"})),
    record("rank-0", 1, 95, (100, "resumed", {"step": 0}), step(100.5, 1), step(101, 2), step(102, 3), step(102.8, 4)),
    record("agent", 2, 103, (103, "attempt", START | {"from_step": 3}), (103, "begin", {"name": "startup"}),
           (106, "end-span", {"name": "startup"}), (108, "checkpoint", {"step": 5, "digest": "d"}),
           (108, "exit", {"rank": 0, "code": 0}), (108, "end", {"outcome": "finished", "reason": "all steps done"})),
    record("rank-0", 2, 105, (106, "resumed", {"step": 3}), step(106.5, 4), step(107, 5)),
]  # fmt: skip
STRUCK = round(102.2 * S)
EQUAL, OTHER = RunComparison(True, 5, 1), RunComparison(False, 5, 1, step=4, differs=("loss",))


def test_a_restart_is_measured_from_the_strike_to_the_first_step_of_the_next_life() -> None:
    found = measure(KILLED, STRUCK, "restarted", ("exit",))
    assert found.noticed_s == pytest.approx(0.55)
    assert found.stepping_s == pytest.approx(4.3), "and not to the step of the first life that was thrown away"
    assert found.redone == 1
    # rework: step 4 of the first life from 102.3 to its exit at 102.75 (cut there); restart: 102.75 to 103, 103 to 106
    assert found.lost_s == pytest.approx(0.45 + 0.25 + 3.0)
    assert lost_s(KILLED) == found.lost_s


def test_what_was_seen_from_outside_counts_where_nobody_inside_can_tell() -> None:
    found = measure(KILLED, STRUCK, "resumed", (), seen_ns=round(103.2 * S))
    assert found.noticed_s == pytest.approx(1.0)
    assert found.stepping_s == pytest.approx(4.3)


def test_workers_that_are_woken_go_on_in_the_same_life() -> None:
    records = [
        record("agent", 1, 90, (99, "woken", {"rank": 1, "text": "an earlier one"}), (103, "hang", {"rank": 0})),
        record("rank-0", 1, 95, step(101, 1), step(102.5, 2), step(103.5, 3), step(104, 4)),
    ]
    found = measure(records, STRUCK, "woken", ("hang", "woken"))
    assert (found.noticed_s, found.stepping_s) == (pytest.approx(0.8), pytest.approx(1.3))


def test_where_no_step_has_to_wait_the_longest_gap_is_told() -> None:
    steps = [step(90, 1), step(100, 2), step(102, 3), step(102.6, 4), step(103.5, 5), step(104, 6)]
    records = [record("agent", 1, 80, (103, "adopted", {"text": "t"})), record("rank-0", 1, 80, *steps)]
    found = measure(records, STRUCK, "unhurt", ("adopted",))
    assert found.noticed_s == pytest.approx(0.8)
    assert found.stepping_s == pytest.approx(0.9), "of the gaps since, and not of the long one before"
    late = measure([records[0], record("rank-0", 1, 80, *steps[:2], step(102.6, 4))], STRUCK, "unhurt", ("adopted",))
    assert late.stepping_s == pytest.approx(2.6), "the step in which it struck counts from the end of the one before"


def test_what_never_was_has_no_figure() -> None:
    found = measure(KILLED[:2], STRUCK, "restarted", ("hang",))
    assert (found.noticed_s, found.stepping_s) == (None, None)
    refused = measure(KILLED, STRUCK, "refused", ("exit",))
    assert (refused.noticed_s, refused.stepping_s) == (pytest.approx(0.55), None)


def test_the_median_step() -> None:
    steps = [step(100, 1), step(101, 2), step(102.5, 3), step(112.5, 4), step(113.5, 5)]
    assert median_step_s([record("rank-0", 1, 90, *steps)]) == pytest.approx(1.5)  # of 1, 1, 1.5, 10: the upper middle
    assert median_step_s([]) == 0.0


def test_what_was_said_since_the_strike_each_sentence_once() -> None:
    agent = record(
        "agent", 1, 90, (100, "woken", {"text": "before"}), (103, "hang", {"text": "only a part"}),
        (104, "woken", {"text": "woken"}), (105, "adopted", {"text": "adopted"}), (106, "woken", {"text": "woken"}),
        (107, "unsaved", {"message": "disk full"}), (108, "straggler", {"text": "slow"}),
        (109, "end", {"outcome": "failed", "reason": "why", "recovery": "what is done"}),
    )  # fmt: skip
    ends = record("agent", 2, 110, (111, "end", {"outcome": "failed", "reason": "why it is over"}))
    last = record("agent", 3, 112, (113, "end", {"outcome": "finished", "reason": "all steps done"}))
    words = ["woken", "adopted", "disk full", "slow", "what is done", "why it is over"]
    assert said([last, agent, ends], STRUCK) == words


# -- the oracle


def judge_row(row: str, records: list[Record] = KILLED, **otherwise: Any) -> list[str]:
    facts: dict[str, Any] = {"statuses": [0], "struck_ns": STRUCK, "rank": 0, "steps": 5, "against": EQUAL}
    return oracle_violations(BY_NAME[row], records, **facts | otherwise)


def test_a_row_that_is_as_it_must_be_has_no_complaint() -> None:
    assert judge_row("kill-worker") == []


@pytest.mark.parametrize(
    ("row", "otherwise", "complaint"),
    [
        ("kill-worker", {"statuses": [1]}, "its keepers ended with status 1, not status 0"),
        ("kill-worker", {"statuses": [None]}, "its keepers ended with no end in time, not status 0"),
        ("sigterm", {"statuses": [0]}, "its keepers ended with status 0, not status 75, then status 0"),
        ("kill-agent", {}, "2 attempts, not 1"),
        ("fault-in-recovery", {}, "2 attempts, not 3"),
        ("hang-data", {}, "not noticed: no event of hang"),
        ("kill-worker", {"struck_ns": 109 * S}, "not noticed: no event of exit"),
        ("kill-worker", {"against": OTHER}, "they diverge at step 4: loss differ"),
        ("kill-worker", {"against": None}, "there is no run to hold it against"),
        ("kill-worker", {"steps": 6}, "it got to step 5 of 6"),
        ("same-error", {"statuses": [1]}, "the reason does not say why: 'all steps done'"),
    ],
)
def test_what_is_not_as_it_must_be_is_told(row: str, otherwise: dict[str, Any], complaint: str) -> None:
    assert complaint in judge_row(row, **otherwise)


def test_a_last_state_that_was_not_saved_is_told() -> None:
    records = [replace(one, events=[e for e in one.events if e["kind"] != "checkpoint"]) for one in KILLED]
    assert judge_row("kill-worker", records) == ["its last state was not saved"]


def test_naming_another_worker_is_told() -> None:
    hangs = [record("agent", 2, 100, (103, "hang", {"rank": rank})) for rank in (0, 1)]
    assert judge_row("hang-data", [*KILLED, hangs[0]]) == []
    assert judge_row("hang-data", [*KILLED, *hangs]) == ["worker 1 was named for worker 0"]


def test_a_refusal_must_say_why_and_needs_no_other_run() -> None:
    end = {"outcome": "failed", "reason": "worker 0 failed: the same error at the same place a second time"}
    records = [*KILLED[:2], record("agent", 2, 104, (105, "end", end))]
    assert judge_row("same-error", records, statuses=[1], against=None) == []


# -- torchrun


def moved(*moments: tuple[float, str]) -> list[dict[str, Any]]:
    return [{"kind": kind, "at_ns": round(at * S)} for at, kind in moments]


def test_how_a_try_under_torchrun_is_judged() -> None:
    before = moved((90, "start"), (100, "step"), (102.3, "step"))
    on = moved((104.2, "start"), (107.2, "step"), (107.3, "step"), (107.4, "step"))
    now = 108 * S
    assert judge(before + on, STRUCK, now, None) == BaselineRun("recovered", pytest.approx(2.0), pytest.approx(5.0))
    assert judge(before + on[:-1], STRUCK, now, None) is None, "two steps are not enough as long as it runs"
    assert judge(before + on[:-1], STRUCK, now, 0) == BaselineRun("recovered", pytest.approx(2.0), pytest.approx(5.0))
    assert judge(before + on[:-1], STRUCK, now, 1) == BaselineRun("job lost", pytest.approx(2.0))
    assert judge(before, STRUCK, now, -9) == BaselineRun("job lost", None)
    assert judge(before, STRUCK, STRUCK + 59 * S, None) is None
    assert judge(before, STRUCK, STRUCK + 61 * S, None) == BaselineRun("not in time", None)


# -- what is left behind

PARENT = "import subprocess, sys; subprocess.Popen(['sleep', '300']); sys.exit(7)"


def test_orphans_are_found_and_ended_and_nobody_else(tmp_path: Path) -> None:
    elder = subprocess.Popen(["sleep", "300"])
    try:
        with track_descendants() as family:
            parent = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True)
            family.own(parent.pid)
            eventually(lambda: list(family.living().values()) == ["sleep: sleep 300"], family.living)
            (orphan,) = family.living()
            assert parent.wait() == 7, "its end was left to whoever waits for it"
            assert family.wait(0.1) == {orphan: "sleep: sleep 300"}
            family.end()
            assert family.living() == {}
            with pytest.raises(ProcessLookupError):
                os.kill(orphan, 0)
            another = subprocess.Popen(["sleep", "300"])
            family.own(another.pid)
        assert another.wait(CEILING_S) == -signal.SIGKILL, "what is left on the way out is ended"
        assert elder.poll() is None, "who was there before is nobody's offspring"
    finally:
        elder.kill()
        elder.wait()


def test_belongings_count_descriptors_and_shared_memory(tmp_path: Path) -> None:
    before = belongings(tmp_path)
    memory = os.memfd_create("headway-test")
    (tmp_path / "segment").touch()
    try:
        now = belongings(tmp_path)
        assert now.descriptors == before.descriptors + 1
        assert now.shared - before.shared == {"segment"}
    finally:
        os.close(memory)
    assert belongings().descriptors == before.descriptors
