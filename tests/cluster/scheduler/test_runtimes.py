"""Run time distributions against a separate Kaplan-Meier estimator, and plain shares."""

from random import Random

import pytest

from headway.cluster.scheduler.history import JobHistory
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.runtimes import JobClass, ObservedRuntime, RuntimeHistory, RuntimeSampler

RED = JobClass("red", "", 1)
DRAWS = 4000


def make_sampler(
    known: list[tuple[float, bool]],
    seed: int,
    job_class: JobClass = RED,
    pace_spread: float = 0.0,
    min_recent: int = 500,
) -> RuntimeSampler:
    runtimes = RuntimeHistory()
    for seconds, ended in known:
        if ended:
            runtimes.ended(job_class, seconds, seconds)
    running = [(job_class, ObservedRuntime(0.0, seconds, False)) for seconds, ended in known if not ended]
    return RuntimeSampler(runtimes.with_running(running), Random(seed), pace_spread=pace_spread, min_recent=min_recent)


def kaplan_meier(known: list[tuple[float, bool]], beyond: float, after: float = 0.0) -> float:
    """Return the share of jobs that take longer than `beyond`, of those that take longer than `after`."""
    share = 1.0
    for at in sorted({seconds for seconds, ended in known if ended and after < seconds <= beyond}):
        ends = sum(seconds == at and ended for seconds, ended in known)
        at_risk = sum(seconds >= at for seconds, _ in known)
        share *= 1 - ends / at_risk
    return share


# Half of a hundred jobs are short; of the long ones a third still runs.
MANY = [(10.0 + number, True) for number in range(50)] + [
    (1000.0 + 20 * number, number % 3 > 0) for number in range(49)
] + [(5000.0, True)]  # fmt: skip


@pytest.mark.parametrize(
    ("after", "beyond"),
    [(0.0, 35.5), (0.0, 900.0), (0.0, 1702.0), (30.5, 35.5), (30.5, 1301.0), (500.0, 1301.0), (1401.0, 1702.0)],
)
def test_draws_follow_the_kaplan_meier_estimator(after: float, beyond: float) -> None:
    sampler = make_sampler(MANY, seed=1)
    draws = [sampler.draw(RED, after) for _ in range(DRAWS)]
    assert min(draws) > after
    share = sum(seconds > beyond for seconds in draws) / DRAWS
    assert share == pytest.approx(
        kaplan_meier(MANY, beyond, after), abs=0.035
    )  # 4 sigma, and some weight of wider groups


def test_running_jobs_count_so_that_long_jobs_are_not_missing() -> None:
    """Ninety of a hundred similar jobs still run after a day, ten ended within an hour: few are short."""
    known = [(3000.0, True)] * 10 + [(86400.0, False)] * 90
    sampler = make_sampler(known, seed=2)
    assert sum(sampler.draw(RED) < 4000 for _ in range(1000)) < 150


def test_beyond_all_known_run_times_half_of_the_jobs_double_their_age() -> None:
    sampler = make_sampler([(100.0, True)] * 50, seed=3)
    draws = [sampler.draw(RED, 5000.0) for _ in range(DRAWS)]
    assert min(draws) > 5000.0
    assert sum(seconds > 10_000.0 for seconds in draws) / DRAWS == pytest.approx(0.5, abs=0.035)


def test_draws_are_plausible_without_any_history() -> None:
    sampler = RuntimeSampler({}, Random(4))
    draws = [sampler.draw(RED) for _ in range(100)]
    assert all(0 < seconds < 90 * 86400 for seconds in draws)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("its own tenant", JobClass("red", "", 1), 100.0),
        ("another tenant of the same size", JobClass("green", "", 1), 150.0),
        ("its own tenant, another size", JobClass("blue", "", 8), 9000.0),
        ("its own user", JobClass("blue", "ann", 1), 700.0),
        ("nothing similar", JobClass("green", "", 64), 150.0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_narrowest_known_group_counts_most(name: str, asked: JobClass, expected: float) -> None:
    runtimes = RuntimeHistory()
    for number in range(40):
        for job_class, seconds in (
            (JobClass("red", "", 1), 100.0), (JobClass("blue", "bob", 1), 200.0), (JobClass("blue", "ann", 1), 700.0),
            (JobClass("blue", "bob", 8), 9000.0),
        ):  # fmt: skip
            runtimes.ended(job_class, number * 10_000.0, seconds)
    sampler = RuntimeSampler(runtimes.with_running(()), Random(5), pace_spread=0.0, min_recent=500)
    draws = sorted(sampler.draw(asked) for _ in range(600))
    exact = sum(seconds == expected for seconds in draws)
    if expected == 150.0:
        assert draws[300] in (100.0, 200.0, 700.0)
    else:
        assert exact > 480


def test_old_run_times_are_forgotten() -> None:
    runtimes = RuntimeHistory()
    for number in range(1500):
        runtimes.ended(RED, number * 10.0, 5.0 if number < 900 else 7.0)
    sampler = RuntimeSampler(runtimes.with_running(()), Random(6), pace_spread=0.0, min_recent=500)
    assert sum(sampler.draw(RED) == 5.0 for _ in range(500)) == 0


def test_jobs_of_one_sampler_are_alike_and_samplers_differ() -> None:
    """Alternating sweeps of 100 s and 1,000 s: a short memory sees one of them, a long one both."""
    known = [ObservedRuntime(number * 10.0, 100.0 if number // 40 % 2 else 1000.0, True) for number in range(400)]
    looks = []
    for seed in range(40):
        sampler = RuntimeSampler({("red", 0, 0): known}, Random(seed), pace_spread=0.0, min_recent=8)
        looks.append(sum(sampler.draw(RED) > 500 for _ in range(50)) / 50)
    assert min(looks) < 0.2
    assert max(looks) > 0.4


def test_same_seed_gives_the_same_draws() -> None:
    first, second = (make_sampler(MANY, seed=7, pace_spread=0.3) for _ in range(2))
    assert [first.draw(RED) for _ in range(50)] == [second.draw(RED) for _ in range(50)]


# -- history


def test_burst_counts_similar_jobs_that_arrived_just_before() -> None:
    history = JobHistory()
    for number in range(30):
        history.submitted(Job(f"a{number}", "red", 1, submit_s=10.0 * number))
    history.submitted(Job("other", "red", 8, submit_s=300.0))
    history.submitted(Job("late", "red", 1, submit_s=300.0 + 601.0))
    assert history.classes["a0"].burst == 0
    assert history.classes["a29"].burst == 29
    assert history.classes["a29"].sweep == history.classes["a0"].sweep
    assert history.classes["other"].burst == 0
    assert history.classes["late"].burst == 0
    assert history.classes["late"].sweep != history.classes["a0"].sweep


def test_ended_job_leaves_only_its_run_time() -> None:
    history = JobHistory()
    for number in range(2000):
        history.submitted(Job(f"a{number}", "red", 1, submit_s=1000.0 * number))
        history.ended(f"a{number}", 1000.0 * number + 5, 5.0)
    assert not history.classes
    assert len(history.runtimes.with_running(())) < 20, "old sweeps are forgotten"


def test_cancelled_job_leaves_no_run_time() -> None:
    history = JobHistory()
    history.submitted(Job("a", "red", 1))
    history.departed("a")
    assert not history.classes
    assert not history.runtimes.with_running(())
