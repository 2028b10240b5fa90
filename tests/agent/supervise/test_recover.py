"""Decisions of `recover`, cause by cause; and that it always terminates."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.agent.supervise.recover import (
    Failure,
    NodeCapacity,
    Recovery,
    RecoveryRules,
    RestorableSteps,
    Situation,
    recover,
)
from thinned import examples

WHAT = "worker 1 was killed by signal 9 (SIGKILL)"
NOW = 1000.0
CAUSES = ("died", "hung", "stopped", "raised", "not finite", "spike", "corrupted", "damaged", "agent died", "other")
RETRIED = ("died", "hung", "stopped", "corrupted", "agent died")
"""Causes that a restart may fix, and which count as tries."""


def failed(cause="died", step=41, reached=None, place="", at=NOW, **more):
    return Failure(cause, WHAT, step, step - 1 if reached is None else reached, place, at=at, **more)


def situation(cause="died", before=(), restarts=3, live=False, states=None, rules=None, **more):
    known = RestorableSteps(**({"start": 0} | (states or {})))
    return Situation(
        failed(cause, **more), tuple(before), RecoveryRules(restarts=restarts, **rules or {}), known, workers_live=live
    )


def decide(given):
    recovery = recover(given, NOW)
    return recovery.action, recovery.source, recovery.step


STOP = ("stop", "start", 0)
START = ("restart", "start", 0)

STATES = [
    # the newest state, the fastest to read among equals
    ("nothing saved yet", {}, START),
    ("nothing saved, and the start is gone", {"start": None}, STOP),
    ("started from a checkpoint: a fork, a resumed run", {"start": 12}, ("restart", "start", 12)),
    ("memory only", {"memory": 40}, ("restart", "memory", 40)),
    ("the state of step 0 in memory", {"memory": 0}, ("restart", "memory", 0)),
    ("disk only", {"disk": 30}, ("restart", "disk", 30)),
    ("store only", {"store": 20}, ("restart", "store", 20)),
    ("memory is newest", {"memory": 40, "disk": 30, "store": 20}, ("restart", "memory", 40)),
    ("memory and disk are the same", {"memory": 40, "disk": 40}, ("restart", "memory", 40)),
    ("all are the same", {"memory": 40, "disk": 40, "store": 40, "start": 40}, ("restart", "memory", 40)),
    ("disk is newer than memory", {"memory": 20, "disk": 30, "store": 20}, ("restart", "disk", 30)),
    ("disk and store are the same", {"disk": 30, "store": 30}, ("restart", "disk", 30)),
    ("disk is where it started", {"disk": 30, "start": 30}, ("restart", "disk", 30)),
    ("store is newest", {"memory": 20, "disk": 30, "store": 40}, ("restart", "store", 40)),
    ("store is newer than memory", {"memory": 20, "store": 40}, ("restart", "store", 40)),
    ("memory, and the start is gone", {"memory": 5, "start": None}, ("restart", "memory", 5)),
    ("started later than what is on disk", {"disk": 30, "start": 35}, ("restart", "start", 35)),
]


@pytest.mark.parametrize(("states", "want"), [row[1:] for row in STATES], ids=[row[0] for row in STATES])
@pytest.mark.parametrize("cause", [*RETRIED, "damaged", "raised", "not finite", "spike"])
def test_restart_uses_the_newest_state(cause, states, want):
    """The first failure of any cause is a plain restart."""
    given = situation(cause, states=states, place="loop.py:7", window=(8, 16))
    assert decide(given) == want
    recovery = recover(given, NOW)
    assert recovery.reason.startswith(WHAT)
    assert (recovery.pause_s, recovery.continue_rank, recovery.skip, recovery.cut, recovery.accept) == (
        0,
        None,
        None,
        None,
        None,
    )
    if recovery.action == "restart" and recovery.source != "start":
        assert f"step {recovery.step} (" in recovery.reason
        assert recovery.source in recovery.reason


@pytest.mark.parametrize("states", [row[1] for row in STATES], ids=[row[0] for row in STATES])
@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("live", [False, True])
def test_failure_that_would_repeat_is_not_retried(states, restarts, live):
    assert decide(situation("other", states=states, restarts=restarts, live=live)) == STOP


# -- nothing is lost


def test_live_workers_go_on():
    """However often that happened, and however many restarts are allowed."""
    before = [failed("hung", reached=40)] * 9
    for restarts in (0, 3):
        stopped = recover(situation("stopped", before, restarts, live=True, rank=1), NOW)
        assert stopped == Recovery("go-on", f"{WHAT}; continued with SIGCONT", continue_rank=1)
        slow = recover(situation("hung", before, restarts, live=True, rank=1), NOW)
        assert slow == Recovery("go-on", f"{WHAT}; it is making progress again")
        adopted = recover(situation("agent died", before, restarts, live=True), NOW)
        assert adopted == Recovery("go-on", f"{WHAT}; a new agent took over its workers")


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause not in ("stopped", "hung", "agent died")])
def test_live_workers_do_not_go_on_after_other_causes(cause):
    assert recover(situation(cause, live=True), NOW).action != "go-on"


# -- restarts without progress


def failures_of(cause, steps_reached, **more):
    """One failure of a cause per step reached."""
    return [failed(cause, reached=reached, step=reached + 1, **more) for reached in steps_reached]


TRIES = [
    # restarts allowed, step that each failure reached (the last is this one), whether there is another try
    (0, [40], False),
    (0, [40, 50], False),
    (1, [40], True),
    (1, [40, 40], False),
    (1, [40, 41], True),
    (1, [40, 39], False),
    (3, [40, 40, 40], True),
    (3, [40, 40, 40, 40], False),
    (3, [40, 40, 40, 41], True),
    (3, [40, 40, 40, 41, 41, 41, 41], False),
    (3, [40, 40, 40, 41, 41, 41], True),
    (3, [40, 10, 20, 30], False),  # further than last time is not further than ever
    (3, [0, 0, 0], True),  # before the first step
    (3, [0, 0, 0, 0], False),
    (3, [1, 2, 3, 4, 5, 6, 7, 8, 9], True),  # each further than ever
]


@pytest.mark.parametrize("cause", RETRIED)
@pytest.mark.parametrize(("restarts", "reached", "again"), TRIES)
def test_progress_resets_the_tries(cause, restarts, reached, again):
    *before, now = failures_of(cause, reached)
    given = Situation(now, tuple(before), RecoveryRules(restarts), RestorableSteps(memory=5))
    assert decide(given) == (("restart", "memory", 5) if again else STOP)
    reason = recover(given, NOW).reason
    assert (f"; no progress in {restarts} restart" in reason) == (not again and restarts > 0)


def test_damaged_state_costs_no_try():
    """It is not the run's fault, and there are only so many states."""
    before = failures_of("damaged", [40] * 9)
    assert decide(Situation(failed("damaged", reached=40), tuple(before), RecoveryRules(1), RestorableSteps(disk=10)))[
        :2
    ] == (
        "restart",
        "disk",
    )
    assert decide(Situation(failed("damaged"), (), RecoveryRules(0), RestorableSteps(disk=10))) == (
        "restart",
        "disk",
        10,
    )
    died = [failed("died", reached=40), *before]
    assert (
        decide(Situation(failed("died", reached=40), tuple(died), RecoveryRules(2), RestorableSteps(disk=10)))[0]
        == "restart"
    )
    assert (
        decide(Situation(failed("died", reached=40), tuple(died), RecoveryRules(1), RestorableSteps(disk=10)))[0]
        == "stop"
    )


NODES = (("n0", 2), ("n1", 2), ("n2", 2))


@pytest.mark.parametrize(
    ("slots", "counts", "workers", "want"),
    [
        (NODES, (1, 2, 4), 4, 4),  # one more than needed
        (NODES[:2], (1, 2, 4), 4, 4),
        (NODES[:1], (1, 2, 4), 4, 2),  # as many as fit
        (NODES[:1], (1, 4), 4, 1),  # and divide the batch
        (NODES[:1], (4,), 4, None),
        ((), (1, 2, 4), 4, None),
    ],
)
def test_run_on_several_nodes_resumes_on_the_remaining_ones(slots, counts, workers, want):
    given = Situation(
        failed("lost", node="n3"),
        (),
        RecoveryRules(),
        RestorableSteps(memory=7),
        places=NodeCapacity(workers, slots, counts),
    )
    recovery = recover(given, NOW)
    assert (recovery.action, recovery.workers) == (("restart", want) if want else ("stop", None))
    assert ("instead of 4" in recovery.reason) == (want not in (None, 4))


def test_run_with_too_few_workers_waits_for_a_node():
    for fewest, want, ending in ((2, 2, "with 2 workers instead of 4"), (3, 4, "once a replacement node joins")):
        places = NodeCapacity(4, NODES[:1], (1, 2, 4), fewest)
        recovery = recover(
            Situation(failed("lost", node="n3"), (), RecoveryRules(), RestorableSteps(memory=7), places=places), NOW
        )
        assert (recovery.action, recovery.workers, recovery.reason.endswith(ending)) == ("restart", want, True)


def test_new_room_is_used_and_costs_no_tries():
    before = [failed("lost", reached=9, node="n3"), failed("room", reached=9), failed("room", reached=9)]
    places = NodeCapacity(2, NODES[:2], (1, 2, 4))
    recovery = recover(
        Situation(failed("room", reached=9), tuple(before), RecoveryRules(1), RestorableSteps(memory=9), places=places),
        NOW,
    )
    assert (recovery.action, recovery.workers, recovery.step, recovery.pause_s) == ("restart", 4, 9, 0)
    assert recovery.reason.endswith("with 4 workers instead of 2")


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_node_that_leaves_costs_no_tries_and_no_pause(restarts):
    """However often the run has failed before."""
    before = tuple(failed(reached=40, node="b") for _ in range(restarts))
    left = failed("left", reached=40)
    places = NodeCapacity(2, (("a", 1), ("b", 1)), (1, 2))
    given = Situation(left, before, RecoveryRules(restarts=restarts), RestorableSteps(memory=40), places=places)
    recovery = recover(given, NOW)
    assert (recovery.action, recovery.step, recovery.pause_s, recovery.workers) == ("restart", 40, 0.0, 2)
    died = Situation(failed(reached=41), (left,), RecoveryRules(restarts=1), RestorableSteps(memory=40))
    assert recover(died, NOW).action == "restart", "and nothing is counted later"


def test_node_with_repeated_failures_is_excluded_and_costs_no_tries():
    places = NodeCapacity(4, NODES, (1, 2, 4))
    row = [failed("died", reached=9, node="n1") for _ in range(5)]

    def decided(*failures, places=places, restarts=1):
        *before, now = failures
        return recover(
            Situation(now, tuple(before), RecoveryRules(restarts), RestorableSteps(memory=7), places=places), NOW
        )

    assert decided(row[0]).avoid == ""
    second = decided(*row[:2])
    assert (second.action, second.avoid, second.workers) == ("restart", "n1", 4)
    assert "without node n1, where 2 attempts failed in a row" in second.reason
    # on another node each time: no node is to blame, and tries are used up
    elsewhere = [failed("died", reached=9, node=node) for node in ("n1", "n2")]
    assert (decided(*elsewhere).action, decided(*elsewhere).avoid) == ("stop", "")
    # progress clears a node
    assert decided(row[0], failed("died", reached=10, node="n1")).avoid == ""
    # the only node stays
    alone = NodeCapacity(2, (("n1", 2),), (1, 2))
    assert (decided(*row[:2], places=alone).action, decided(*row[:2], places=alone, restarts=2).avoid) == ("stop", "")


def test_pauses_grow_to_a_bound_and_elapsed_time_counts():
    """None the first time; then 0.5 s, doubled each time, 30 s at most."""
    pauses = [
        recover(situation("died", failures_of("died", [40] * count), restarts=99), NOW).pause_s for count in range(12)
    ]
    assert pauses[:8] == [0, 0.5, 1, 2, 4, 8, 16, 30]
    assert set(pauses[7:]) == {30.0}
    before = failures_of("died", [40] * 4)
    for passed, want in ((0.0, 4.0), (1.5, 2.5), (4.0, 0.0), (1e6, 0.0)):
        recovery = recover(situation("died", before, restarts=99, at=NOW - passed), NOW)
        assert recovery.pause_s == want
        assert (f", after {want:g} s" in recovery.reason) == (want > 0)
    assert recover(situation("died", [*before, failed("died", reached=41)], reached=42), NOW).pause_s == 0


# -- repeated failures


def test_exception_is_retried_once():
    error = {"cause": "raised", "step": 41, "place": "loop.py:70"}
    first = failed(**error)
    assert decide(situation(**error, states={"memory": 40})) == ("restart", "memory", 40)
    again = recover(situation(**error, before=[first], states={"memory": 40}), NOW)
    assert (again.action, again.reason) == ("stop", f"{WHAT}: the same error at the same place a second time")
    assert decide(situation(**error, before=[first], restarts=99))[0] == "stop", (
        "the number of restarts does not matter"
    )
    for other in ({"step": 42}, {"place": "loop.py:71"}, {"cause": "died"}):
        assert decide(situation(**(error | other), before=[first]))[0] == "restart", other
    between = failed("died", step=41)
    assert decide(situation(**error, before=[first, between]))[0] == "restart", "only the previous failure counts"
    assert decide(situation(**error, before=[between, first]))[0] == "stop"


WINDOW = (320, 328)
NUMBERS = [
    # cause, settings, decision when it repeats at the same step
    ("not finite", {}, ("stop", None, None, None)),
    ("not finite", {"if_not_finite": "stop"}, ("stop", None, None, None)),
    ("not finite", {"if_not_finite": "skip"}, ("restart", WINDOW, None, None)),
    ("not finite", {"if_not_finite": "lower-rate", "rate_factor": 0.25}, ("restart", None, (41, 0.25), None)),
    ("spike", {}, ("restart", None, None, 41)),
    ("spike", {"if_spike": "go-on"}, ("restart", None, None, 41)),
    ("spike", {"if_spike": "stop"}, ("stop", None, None, None)),
    ("spike", {"if_spike": "skip"}, ("restart", WINDOW, None, None)),
    ("spike", {"if_spike": "lower-rate"}, ("restart", None, (41, 0.5), None)),
    # each has its own setting
    ("spike", {"if_spike": "stop", "if_not_finite": "skip"}, ("stop", None, None, None)),
    ("not finite", {"if_spike": "skip", "if_not_finite": "stop"}, ("stop", None, None, None)),
]


@pytest.mark.parametrize(("cause", "rules", "want"), NUMBERS)
def test_bad_numbers_are_replayed_before_anything_is_changed(cause, rules, want):
    bad = {"cause": cause, "window": WINDOW, "usual": 2.5, "spread": 0.125}
    first = recover(situation(**bad, rules=rules, states={"memory": 40}), NOW)
    assert (first.action, first.source, first.step) == ("restart", "memory", 40)
    assert (first.skip, first.cut, first.accept) == (None, None, None)
    judge = (41, 2.5, 0.125) if cause == "spike" else None
    assert first.judge == judge, "the replay is compared with the same numbers"

    again = recover(situation(**bad, before=[failed(**bad)], rules=rules, states={"memory": 40}), NOW)
    assert (again.action, again.skip, again.cut, again.accept) == want
    assert again.reason.startswith(f"{WHAT}, again after a replay")
    for part, text in ((again.skip, "skipping samples 320 to 327"), (again.cut, "learning rate multiplied")):
        assert (text in again.reason) == (part is not None)
    if again.action == "stop":
        assert f"health.if_{cause.replace(' ', '_')} is 'stop'" in again.reason


@pytest.mark.parametrize("other", [{"window": (328, 336)}, {"step": 40}, {"cause": "died"}], ids=str)
def test_bad_numbers_elsewhere_are_not_a_repetition(other):
    bad = {"cause": "not finite", "window": WINDOW, "step": 41}
    rules = {"if_not_finite": "skip"}
    recovery = recover(situation(**bad, before=[failed(**(bad | other))], rules=rules), NOW)
    assert (recovery.action, recovery.skip) == ("restart", None)


def test_bad_numbers_stop_when_no_try_is_left():
    bad = {"cause": "not finite", "window": WINDOW}
    before = [failed(**bad)] * 3
    assert decide(situation(**bad, before=before, rules={"if_not_finite": "skip"}, restarts=3))[0] == "stop"
    assert decide(situation(**bad, restarts=0)) == STOP


def test_reasons():
    def reason(cause="died", **more):
        return recover(situation(cause, **more), NOW).reason

    assert reason(states={"memory": 40}) == f"{WHAT}; resuming from step 40 (memory)"
    assert reason(states={"store": 7}) == f"{WHAT}; resuming from step 7 (object store)"
    assert reason(states={"start": 7}) == f"{WHAT}; resuming from step 7"
    assert reason() == f"{WHAT}; nothing saved yet, restarting from step 0"
    before = [failed(reached=40)]
    assert reason(before=before, states={"disk": 4}) == f"{WHAT}; resuming from step 4 (disk), after 0.5 s"
    assert reason(before=before, restarts=1) == f"{WHAT}; no progress in 1 restart"
    assert reason(restarts=0) == WHAT
    assert reason("other") == f"{WHAT}: a restart would not help"
    assert reason("damaged", states={"start": None}) == f"{WHAT}; no checkpoint or snapshot to resume from"


# -- any situation


steps = st.integers(0, 50)
maybe = st.none() | steps
failures = st.builds(
    Failure,
    st.sampled_from(CAUSES),
    st.just(WHAT),
    steps,
    steps,
    st.sampled_from(["", "loop.py:1", "loop.py:2"]),
    st.none() | st.integers(0, 3),
    st.floats(0, NOW),
    st.none() | st.just(WINDOW),
    st.floats(0, 9),
    st.floats(0, 9),
)
rules = st.builds(
    RecoveryRules,
    st.integers(0, 5),
    st.sampled_from(["stop", "skip", "lower-rate"]),
    st.sampled_from(["go-on", "stop", "skip", "lower-rate"]),
    st.floats(0.1, 0.9),
)
situations = st.builds(
    Situation,
    failures,
    st.lists(failures, max_size=6).map(tuple),
    rules,
    st.builds(RestorableSteps, maybe, maybe, maybe, maybe),
    st.booleans(),
)


@settings(max_examples=examples(100), deadline=None)
@given(situations, st.floats(0, 100))
def test_restart_is_from_the_newest_existing_state(given, later):
    recovery = recover(given, NOW + later)
    assert recovery.reason.startswith(WHAT)
    assert 0 <= recovery.pause_s <= 30
    known = {name: getattr(given.states, name) for name in ("memory", "disk", "store", "start")}
    if recovery.action == "restart":
        assert recovery.step == known[recovery.source]
        assert recovery.step == max(step for step in known.values() if step is not None)
        assert recovery.continue_rank is None
    else:
        assert (recovery.skip, recovery.cut, recovery.accept, recovery.judge) == (None, None, None, None)
    if recovery.action == "go-on":
        assert given.workers_live
        assert given.failure.cause in ("stopped", "hung", "agent died")
    assert recover(given, NOW + later) == recovery


@settings(max_examples=examples(80), deadline=None)
@given(
    rules,
    st.builds(RestorableSteps, maybe, maybe, maybe, maybe),
    st.lists(st.sampled_from([cause for cause in CAUSES if cause != "damaged"]), min_size=1, max_size=4),
    st.booleans(),
)
def test_run_without_progress_stops(rules, states, causes, skips):
    """Its decisions are applied, and the same step fails repeatedly for any causes."""
    newest = max((step for step in (states.memory, states.disk, states.store, states.start) if step is not None),
                 default=0)  # fmt: skip
    before, window, waited = [], (80, 88), 0.0
    for tries in range(100):
        failure = failed(causes[tries % len(causes)], reached=newest, step=newest + 1, place="x", window=window)
        recovery = recover(Situation(failure, tuple(before), rules, states), NOW)
        if recovery.action == "stop":
            break
        assert recovery.action == "restart"
        waited += recovery.pause_s
        before.append(failure)
        if recovery.skip is not None and skips:
            window = (window[0] + 8, window[1] + 8)
    assert tries <= rules.restarts
    assert waited <= 0.5 * 2**rules.restarts


@settings(max_examples=examples(80), deadline=None)
@given(rules, maybe, st.sets(steps, max_size=5), st.sets(steps, max_size=5), maybe)
def test_run_with_only_damaged_states_stops(rules, memory, disk, store, start):
    """Each state turns out to be damaged: all are tried once, newest first, then the run stops."""
    before, tried = [], []
    disk, store = set(disk), set(store)
    for _ in range(50):
        states = RestorableSteps(memory, max(disk, default=None), max(store, default=None), start)
        failure = failed("damaged", reached=max(tried, default=50))
        recovery = recover(Situation(failure, tuple(before), rules, states), NOW)
        if recovery.action == "stop":
            break
        tried.append(recovery.step)
        before.append(replace(failure, place=recovery.source))
        disk -= {recovery.step} if recovery.source == "disk" else set()
        store -= {recovery.step} if recovery.source == "store" else set()
        memory = None if recovery.source == "memory" else memory
        start = None if recovery.source == "start" else start
    assert (memory, disk, store, start) == (None, set(), set(), None)
    assert all(earlier >= later for earlier, later in pairwise(tried))
