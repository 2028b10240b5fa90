"""How long jobs may take: against the estimate of Kaplan and Meier worked out by itself, and plain shares."""

from random import Random

import pytest

from headway.cluster.scheduler.history import JobHistory
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.runtimes import JobClass, ObservedRuntime, RuntimeHistory, RuntimeSampler

RED = JobClass("red", "", 1)
DRAWS = 4000


def lives(
    known: list[tuple[float, bool]], seed: int, kind: JobClass = RED, pace: float = 0.0, fewest: int = 500
) -> RuntimeSampler:
    runtimes = RuntimeHistory()
    for seconds, ended in known:
        if ended:
            runtimes.ended(kind, seconds, seconds)
    running = [(kind, ObservedRuntime(0.0, seconds, False)) for seconds, ended in known if not ended]
    return RuntimeSampler(runtimes.beside(running), Random(seed), pace=pace, fewest=fewest)


def kaplan_meier(known: list[tuple[float, bool]], beyond: float, after: float = 0.0) -> float:
    """The share of jobs that take longer than `beyond`, of those that take longer than `after`."""
    share = 1.0
    for at in sorted({seconds for seconds, ended in known if ended and after < seconds <= beyond}):
        ends = sum(seconds == at and ended for seconds, ended in known)
        there = sum(seconds >= at for seconds, _ in known)
        share *= 1 - ends / there
    return share


# Half of a hundred jobs are short; of the long ones a third still runs.
MANY = [(10.0 + number, True) for number in range(50)] + [
    (1000.0 + 20 * number, number % 3 > 0) for number in range(49)
] + [(5000.0, True)]  # fmt: skip


@pytest.mark.parametrize(
    ("after", "beyond"),
    [(0.0, 35.5), (0.0, 900.0), (0.0, 1702.0), (30.5, 35.5), (30.5, 1301.0), (500.0, 1301.0), (1401.0, 1702.0)],
)
def test_draws_follow_kaplan_and_meier(after: float, beyond: float) -> None:
    drawn = lives(MANY, seed=1)
    found = [drawn.draw(RED, after) for _ in range(DRAWS)]
    assert min(found) > after
    share = sum(seconds > beyond for seconds in found) / DRAWS
    assert share == pytest.approx(kaplan_meier(MANY, beyond, after), abs=0.035)  # 4 sigma, and a little of wider ones


def test_without_those_that_run_long_jobs_would_be_missing() -> None:
    """Ninety of a hundred like jobs run on after a day, ten ended within an hour: few are short."""
    known = [(3000.0, True)] * 10 + [(86400.0, False)] * 90
    drawn = lives(known, seed=2)
    assert sum(drawn.draw(RED) < 4000 for _ in range(1000)) < 150


def test_beyond_all_that_is_known_half_of_the_jobs_double_their_age() -> None:
    drawn = lives([(100.0, True)] * 50, seed=3)
    found = [drawn.draw(RED, 5000.0) for _ in range(DRAWS)]
    assert min(found) > 5000.0
    assert sum(seconds > 10_000.0 for seconds in found) / DRAWS == pytest.approx(0.5, abs=0.035)


def test_nothing_known_at_all() -> None:
    drawn = RuntimeSampler({}, Random(4))
    found = [drawn.draw(RED) for _ in range(100)]
    assert all(0 < seconds < 90 * 86400 for seconds in found)


@pytest.mark.parametrize(
    ("name", "asked", "near"),
    [
        ("its own tenant", JobClass("red", "", 1), 100.0),
        ("another tenant of the same size", JobClass("green", "", 1), 150.0),
        ("its own tenant, another size", JobClass("blue", "", 8), 9000.0),
        ("its own user", JobClass("blue", "ann", 1), 700.0),
        ("nobody like it", JobClass("green", "", 64), 150.0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_narrowest_group_that_is_known_counts_most(name: str, asked: JobClass, near: float) -> None:
    runtimes = RuntimeHistory()
    for number in range(40):
        for kind, seconds in (
            (JobClass("red", "", 1), 100.0), (JobClass("blue", "bob", 1), 200.0), (JobClass("blue", "ann", 1), 700.0),
            (JobClass("blue", "bob", 8), 9000.0),
        ):  # fmt: skip
            runtimes.ended(kind, number * 10_000.0, seconds)
    drawn = RuntimeSampler(runtimes.beside(()), Random(5), pace=0.0, fewest=500)
    found = sorted(drawn.draw(asked) for _ in range(600))
    exact = sum(seconds == near for seconds in found)
    if near == 150.0:
        assert found[300] in (100.0, 200.0, 700.0)
    else:
        assert exact > 480


def test_what_was_long_ago_is_forgotten() -> None:
    runtimes = RuntimeHistory()
    for number in range(1500):
        runtimes.ended(RED, number * 10.0, 5.0 if number < 900 else 7.0)
    drawn = RuntimeSampler(runtimes.beside(()), Random(6), pace=0.0, fewest=500)
    assert sum(drawn.draw(RED) == 5.0 for _ in range(500)) == 0


def test_jobs_of_one_look_ahead_are_alike_and_looks_ahead_differ() -> None:
    """Sweeps of 100 s and of 1,000 s by turns: a short memory sees one of them, a long one both."""
    known = [ObservedRuntime(number * 10.0, 100.0 if number // 40 % 2 else 1000.0, True) for number in range(400)]
    looks = []
    for seed in range(40):
        drawn = RuntimeSampler({("red", 0, 0): known}, Random(seed), pace=0.0, fewest=8)
        looks.append(sum(drawn.draw(RED) > 500 for _ in range(50)) / 50)
    assert min(looks) < 0.2
    assert max(looks) > 0.4


def test_the_same_chance_gives_the_same_draws() -> None:
    one, other = (lives(MANY, seed=7, pace=0.3) for _ in range(2))
    assert [one.draw(RED) for _ in range(50)] == [other.draw(RED) for _ in range(50)]


# -- history


def test_a_crowd_is_those_alike_that_came_just_before() -> None:
    history = JobHistory()
    for number in range(30):
        history.submitted(Job(f"a{number}", "red", 1, submit_s=10.0 * number))
    history.submitted(Job("other", "red", 8, submit_s=300.0))
    history.submitted(Job("late", "red", 1, submit_s=300.0 + 601.0))
    assert history.kinds["a0"].crowd == 0
    assert history.kinds["a29"].crowd == 29
    assert history.kinds["a29"].sweep == history.kinds["a0"].sweep
    assert history.kinds["other"].crowd == 0
    assert history.kinds["late"].crowd == 0
    assert history.kinds["late"].sweep != history.kinds["a0"].sweep


def test_who_is_gone_leaves_only_how_long_it_took() -> None:
    history = JobHistory()
    for number in range(2000):
        history.submitted(Job(f"a{number}", "red", 1, submit_s=1000.0 * number))
        history.ended(f"a{number}", 1000.0 * number + 5, 5.0)
    assert not history.kinds
    assert len(history.runtimes.beside(())) < 20, "sweeps of long ago are forgotten"


def test_a_job_that_is_taken_back_says_nothing() -> None:
    history = JobHistory()
    history.submitted(Job("a", "red", 1))
    history.departed("a")
    assert not history.kinds
    assert not history.runtimes.beside(())
