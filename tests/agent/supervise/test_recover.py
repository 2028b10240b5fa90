"""What `recover` answers, cause by cause; and that whatever happens, it comes to an end."""

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
MENDED = ("died", "hung", "stopped", "corrupted", "agent died")
"""What a restart may mend, and which counts as a try."""


def failed(cause="died", step=41, reached=None, place="", at=NOW, **more):
    return Failure(cause, WHAT, step, step - 1 if reached is None else reached, place, at=at, **more)


def situation(cause="died", before=(), restarts=3, live=False, states=None, rules=None, **more):
    known = RestorableSteps(**({"start": 0} | (states or {})))
    return Situation(
        failed(cause, **more), tuple(before), RecoveryRules(restarts=restarts, **rules or {}), known, workers_live=live
    )


def found(given):
    recovery = recover(given, NOW)
    return recovery.action, recovery.source, recovery.step


STOP = ("stop", "start", 0)
START = ("restart", "start", 0)

STATES = [
    # the newest state there is, the nearest among equals
    ("nothing saved yet", {}, START),
    ("nothing saved, and no beginning to go back to", {"start": None}, STOP),
    ("a beginning in the middle: a branch, a resumed run", {"start": 12}, ("restart", "start", 12)),
    ("memory only", {"memory": 40}, ("restart", "memory", 40)),
    ("the state of step 0 in memory", {"memory": 0}, ("restart", "memory", 0)),
    ("disk only", {"disk": 30}, ("restart", "disk", 30)),
    ("store only", {"store": 20}, ("restart", "store", 20)),
    ("memory is newest", {"memory": 40, "disk": 30, "store": 20}, ("restart", "memory", 40)),
    ("memory and disk are the same", {"memory": 40, "disk": 40}, ("restart", "memory", 40)),
    ("all are the same", {"memory": 40, "disk": 40, "store": 40, "start": 40}, ("restart", "memory", 40)),
    ("disk is newer than memory", {"memory": 20, "disk": 30, "store": 20}, ("restart", "disk", 30)),
    ("disk and store are the same", {"disk": 30, "store": 30}, ("restart", "disk", 30)),
    ("disk is where it began", {"disk": 30, "start": 30}, ("restart", "disk", 30)),
    ("store is newest", {"memory": 20, "disk": 30, "store": 40}, ("restart", "store", 40)),
    ("store is newer than memory", {"memory": 20, "store": 40}, ("restart", "store", 40)),
    ("memory without a beginning", {"memory": 5, "start": None}, ("restart", "memory", 5)),
    ("began later than what is on disk", {"disk": 30, "start": 35}, ("restart", "start", 35)),
]


@pytest.mark.parametrize(("states", "want"), [row[1:] for row in STATES], ids=[row[0] for row in STATES])
@pytest.mark.parametrize("cause", [*MENDED, "damaged", "raised", "not finite", "spike"])
def test_which_state_a_run_goes_back_to(cause, states, want):
    """The first time something happens, whatever it is, everything is made again."""
    given = situation(cause, states=states, place="loop.py:7", window=(8, 16))
    assert found(given) == want
    recovery = recover(given, NOW)
    assert recovery.reason.startswith(WHAT)
    assert (recovery.pause_s, recovery.wake, recovery.skip, recovery.cut, recovery.accept) == (
        0,
        None,
        None,
        None,
        None,
    )
    if recovery.action == "restart" and recovery.source != "start":
        assert f"step {recovery.step}, from " in recovery.reason
        assert recovery.source in recovery.reason


@pytest.mark.parametrize("states", [row[1] for row in STATES], ids=[row[0] for row in STATES])
@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("live", [False, True])
def test_what_would_come_again_is_not_tried_again(states, restarts, live):
    assert found(situation("other", states=states, restarts=restarts, live=live)) == STOP


# -- nothing is lost


def test_what_is_still_there_goes_on():
    """However often that was, and whatever may be restarted."""
    before = [failed("hung", reached=40)] * 9
    for restarts in (0, 3):
        stopped = recover(situation("stopped", before, restarts, live=True, rank=1), NOW)
        assert stopped == Recovery("go-on", f"{WHAT}; woken", wake=1)
        slow = recover(situation("hung", before, restarts, live=True, rank=1), NOW)
        assert slow == Recovery("go-on", f"{WHAT}; it is making progress again")
        adopted = recover(situation("agent died", before, restarts, live=True), NOW)
        assert adopted == Recovery("go-on", f"{WHAT}; a new agent took over its workers")


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause not in ("stopped", "hung", "agent died")])
def test_workers_that_live_do_not_go_on_with_what_is_broken(cause):
    assert recover(situation(cause, live=True), NOW).action != "go-on"


# -- patience


def row_of(cause, steps_reached, **more):
    """Failures of one kind, with what each had reached."""
    return [failed(cause, reached=reached, step=reached + 1, **more) for reached in steps_reached]


PATIENCE = [
    # restarts allowed, what each failure had reached (the last is this one), whether there is another try
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
    (3, [40, 10, 20, 30], False),  # getting further than last time is not getting further than ever
    (3, [0, 0, 0], True),  # before the first step
    (3, [0, 0, 0, 0], False),
    (3, [1, 2, 3, 4, 5, 6, 7, 8, 9], True),  # as many as there are, each further than ever
]


@pytest.mark.parametrize("cause", MENDED)
@pytest.mark.parametrize(("restarts", "reached", "again"), PATIENCE)
def test_progress_gives_tries_back(cause, restarts, reached, again):
    *before, now = row_of(cause, reached)
    given = Situation(now, tuple(before), RecoveryRules(restarts), RestorableSteps(memory=5))
    assert found(given) == (("restart", "memory", 5) if again else STOP)
    told = recover(given, NOW).reason
    assert (", and again without any progress" in told) == (not again and restarts > 0)


def test_a_damaged_state_costs_no_try():
    """It says nothing of the run; and there are only so many of them."""
    before = row_of("damaged", [40] * 9)
    assert found(Situation(failed("damaged", reached=40), tuple(before), RecoveryRules(1), RestorableSteps(disk=10)))[
        :2
    ] == (
        "restart",
        "disk",
    )
    assert found(Situation(failed("damaged"), (), RecoveryRules(0), RestorableSteps(disk=10))) == (
        "restart",
        "disk",
        10,
    )
    died = [failed("died", reached=40), *before]
    assert (
        found(Situation(failed("died", reached=40), tuple(died), RecoveryRules(2), RestorableSteps(disk=10)))[0]
        == "restart"
    )
    assert (
        found(Situation(failed("died", reached=40), tuple(died), RecoveryRules(1), RestorableSteps(disk=10)))[0]
        == "stop"
    )


NODES = (("n0", 2), ("n1", 2), ("n2", 2))


@pytest.mark.parametrize(
    ("able", "counts", "workers", "want"),
    [
        (NODES, (1, 2, 4), 4, 4),  # one more than needed
        (NODES[:2], (1, 2, 4), 4, 4),
        (NODES[:1], (1, 2, 4), 4, 2),  # as many as there is room for
        (NODES[:1], (1, 4), 4, 1),  # and as can share the batch
        (NODES[:1], (4,), 4, None),
        ((), (1, 2, 4), 4, None),
    ],
)
def test_a_run_on_several_nodes_goes_on_with_what_is_left(able, counts, workers, want):
    given = Situation(
        failed("lost", node="n3"),
        (),
        RecoveryRules(),
        RestorableSteps(memory=7),
        places=NodeCapacity(workers, able, counts),
    )
    told = recover(given, NOW)
    assert (told.action, told.workers) == (("restart", want) if want else ("stop", None))
    assert ("instead of 4" in told.reason) == (want not in (None, 4))


def test_a_run_that_wants_enough_workers_waits_for_a_node():
    for fewest, want, words in ((2, 2, "with 2 workers instead of 4"), (3, 4, "once there is a node in its place")):
        places = NodeCapacity(4, NODES[:1], (1, 2, 4), fewest)
        told = recover(
            Situation(failed("lost", node="n3"), (), RecoveryRules(), RestorableSteps(memory=7), places=places), NOW
        )
        assert (told.action, told.workers, told.reason.endswith(words)) == ("restart", want, True)


def test_room_for_more_workers_is_taken_and_costs_no_tries():
    before = [failed("lost", reached=9, node="n3"), failed("room", reached=9), failed("room", reached=9)]
    places = NodeCapacity(2, NODES[:2], (1, 2, 4))
    told = recover(
        Situation(failed("room", reached=9), tuple(before), RecoveryRules(1), RestorableSteps(memory=9), places=places),
        NOW,
    )
    assert (told.action, told.workers, told.step, told.pause_s) == ("restart", 4, 9, 0)
    assert told.reason.endswith("with 4 workers instead of 2")


def test_a_node_where_attempts_fail_in_a_row_is_done_without_and_costs_no_tries():
    places = NodeCapacity(4, NODES, (1, 2, 4))
    row = [failed("died", reached=9, node="n1") for _ in range(5)]

    def asked(*failures, where=places, restarts=1):
        *before, now = failures
        return recover(
            Situation(now, tuple(before), RecoveryRules(restarts), RestorableSteps(memory=7), places=where), NOW
        )

    assert asked(row[0]).avoid == ""
    second = asked(*row[:2])
    assert (second.action, second.avoid, second.workers) == ("restart", "n1", 4)
    assert "without node n1, where 2 attempts failed in a row" in second.reason
    # on another node each time: nobody is to blame, and tries are used up
    elsewhere = [failed("died", reached=9, node=node) for node in ("n1", "n2")]
    assert (asked(*elsewhere).action, asked(*elsewhere).avoid) == ("stop", "")
    # steps that are new clear a node's name
    assert asked(row[0], failed("died", reached=10, node="n1")).avoid == ""
    # the only node there is stays
    alone = NodeCapacity(2, (("n1", 2),), (1, 2))
    assert (asked(*row[:2], where=alone).action, asked(*row[:2], where=alone, restarts=2).avoid) == ("stop", "")


def test_pauses_grow_to_a_bound_and_time_that_has_passed_counts():
    """None the first time; then half a second, doubled each time; half a minute at most."""
    pauses = [recover(situation("died", row_of("died", [40] * count), restarts=99), NOW).pause_s for count in range(12)]
    assert pauses[:8] == [0, 0.5, 1, 2, 4, 8, 16, 30]
    assert set(pauses[7:]) == {30.0}
    before = row_of("died", [40] * 4)
    for passed, want in ((0.0, 4.0), (1.5, 2.5), (4.0, 0.0), (1e6, 0.0)):
        recovery = recover(situation("died", before, restarts=99, at=NOW - passed), NOW)
        assert recovery.pause_s == want
        assert (f", after {want:g} s" in recovery.reason) == (want > 0)
    assert recover(situation("died", [*before, failed("died", reached=41)], reached=42), NOW).pause_s == 0


# -- the same again


def test_an_error_of_the_code_is_tried_once_more():
    error = {"cause": "raised", "step": 41, "place": "loop.py:70"}
    first = failed(**error)
    assert found(situation(**error, states={"memory": 40})) == ("restart", "memory", 40)
    again = recover(situation(**error, before=[first], states={"memory": 40}), NOW)
    assert (again.action, again.reason) == ("stop", f"{WHAT}: the same error at the same place a second time")
    assert found(situation(**error, before=[first], restarts=99))[0] == "stop", "patience does not matter"
    for other in ({"step": 42}, {"place": "loop.py:71"}, {"cause": "died"}):
        assert found(situation(**(error | other), before=[first]))[0] == "restart", other
    between = failed("died", step=41)
    assert found(situation(**error, before=[first, between]))[0] == "restart", "it is the last time that counts"
    assert found(situation(**error, before=[between, first]))[0] == "stop"


WINDOW = (320, 328)
NUMBERS = [
    # cause, settings, what is done when it comes again at the same place
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
def test_numbers_that_go_wrong_are_made_again_before_anything_is_changed(cause, rules, want):
    bad = {"cause": cause, "window": WINDOW, "usual": 2.5, "spread": 0.125}
    first = recover(situation(**bad, rules=rules, states={"memory": 40}), NOW)
    assert (first.action, first.source, first.step) == ("restart", "memory", 40)
    assert (first.skip, first.cut, first.accept) == (None, None, None)
    judge = (41, 2.5, 0.125) if cause == "spike" else None
    assert first.judge == judge, "the replay is held against the same numbers"

    again = recover(situation(**bad, before=[failed(**bad)], rules=rules, states={"memory": 40}), NOW)
    assert (again.action, again.skip, again.cut, again.accept) == want
    assert again.reason.startswith(f"{WHAT}, again after a replay")
    for part, text in ((again.skip, "samples 320 to 327 are passed over"), (again.cut, "learning rate is multiplied")):
        assert (text in again.reason) == (part is not None)
    if again.action == "stop":
        assert f"health.if_{cause.replace(' ', '_')} says to stop" in again.reason


@pytest.mark.parametrize("other", [{"window": (328, 336)}, {"step": 40}, {"cause": "died"}], ids=str)
def test_numbers_that_go_wrong_elsewhere_are_no_second_time(other):
    bad = {"cause": "not finite", "window": WINDOW, "step": 41}
    rules = {"if_not_finite": "skip"}
    recovery = recover(situation(**bad, before=[failed(**(bad | other))], rules=rules), NOW)
    assert (recovery.action, recovery.skip) == ("restart", None)


def test_numbers_stop_too_when_no_try_is_left():
    bad = {"cause": "not finite", "window": WINDOW}
    before = [failed(**bad)] * 3
    assert found(situation(**bad, before=before, rules={"if_not_finite": "skip"}, restarts=3))[0] == "stop"
    assert found(situation(**bad, restarts=0)) == STOP


def test_the_reasons_in_words():
    def reason(cause="died", **more):
        return recover(situation(cause, **more), NOW).reason

    assert reason(states={"memory": 40}) == f"{WHAT}; back to step 40, from memory"
    assert reason(states={"store": 7}) == f"{WHAT}; back to step 7, from the object store"
    assert reason(states={"start": 7}) == f"{WHAT}; back to step 7"
    assert reason() == f"{WHAT}; nothing was saved since, back to the start"
    before = [failed(reached=40)]
    assert reason(before=before, states={"disk": 4}) == f"{WHAT}; back to step 4, from disk, after 0.5 s"
    assert reason(before=before, restarts=1) == f"{WHAT}, and again without any progress"
    assert reason(restarts=0) == WHAT
    assert reason("other") == f"{WHAT}: a restart would not help"
    assert reason("damaged", states={"start": None}) == f"{WHAT}; no checkpoint or snapshot to resume from"


# -- whatever happens


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
def test_a_restart_is_from_a_state_that_exists_and_from_the_newest(given, later):
    recovery = recover(given, NOW + later)
    assert recovery.reason.startswith(WHAT)
    assert 0 <= recovery.pause_s <= 30
    there = {name: getattr(given.states, name) for name in ("memory", "disk", "store", "start")}
    if recovery.action == "restart":
        assert recovery.step == there[recovery.source]
        assert recovery.step == max(step for step in there.values() if step is not None)
        assert recovery.wake is None
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
def test_what_gets_no_further_comes_to_an_end(rules, states, causes, skips):
    """Its answers are carried out, and the same step fails again and again, in whichever ways."""
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
def test_damage_everywhere_comes_to_an_end(rules, memory, disk, store, start):
    """Each state is found damaged when it is tried: all are tried once, the newest first, then it is over."""
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
