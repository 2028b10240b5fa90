"""Goodput against simulated failures, brute force, Daly's own figures and a published run."""

import math
from random import Random
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import UsageError
from headway.plan.goodput import Goodput, daly_interval, goodput, save_interval, save_seconds, stall_seconds
from headway.plan.plan import CheckpointStorage
from thinned import examples

HOUR = 3600.0
DAY = 24 * HOUR

# run, time between failures of the job, save, restart, step, interval: seconds. From rare failures to a job that fails
# during most segments; the last run is not a multiple of its interval.
CASES = [
    (5000.0, 4000.0, 10.0, 60.0, 2.0, 200.0),
    (3000.0, 500.0, 20.0, 100.0, 10.0, 150.0),
    (1000.0, 100.0, 30.0, 80.0, 5.0, 125.0),
    (1030.0, 300.0, 5.0, 0.0, 1.0, 100.0),
]


def of_job(mtbf_s: float, **arguments: float) -> Goodput:
    """Goodput of a job of 10 devices that fails every `mtbf_s`."""
    return goodput(devices=10, gpu_hours_between_failures=mtbf_s * 10 / HOUR, **arguments)


def simulate(
    random: Random, run_s: float, mtbf_s: float, save_s: float, restart_s: float, interval_s: float
) -> tuple[float, ...]:
    """Simulate one run: wall time, failures, and seconds of rework and restart."""
    clock, failures, done, rework, restart = 0.0, 0, 0.0, 0.0, 0.0
    failure_at = random.expovariate(1 / mtbf_s)
    working = True
    while done < run_s:
        part = min(interval_s, run_s - done)
        needs = part + save_s if working else restart_s
        if clock + needs > failure_at:
            spent = failure_at - clock
            clock, failures = failure_at, failures + 1
            failure_at = clock + random.expovariate(1 / mtbf_s)
            rework, restart = (rework + spent, restart) if working else (rework, restart + spent)
            working = False
            continue
        clock += needs
        done, restart = (done + part, restart) if working else (done, restart + needs)
        working = True
    return clock, failures, rework, restart


@pytest.mark.parametrize(("run_s", "mtbf_s", "save_s", "restart_s", "step_s", "interval_s"), CASES)
def test_goodput_matches_simulated_runs(
    run_s: float, mtbf_s: float, save_s: float, restart_s: float, step_s: float, interval_s: float
) -> None:
    random = Random(7)
    runs = [simulate(random, run_s, mtbf_s, save_s, restart_s, interval_s) for _ in range(4000)]
    result = of_job(mtbf_s, run_s=run_s, save_s=save_s, restart_s=restart_s, step_s=step_s, interval_s=interval_s)
    assert result.interval_s == pytest.approx(interval_s)
    predicted = (
        result.wall_s,
        result.failures,
        result.accounts["rework"] * result.wall_s,
        result.accounts["restart"] * result.wall_s,
    )
    for value, column in zip(predicted, zip(*runs, strict=True), strict=True):
        assert value == pytest.approx(mean(column), abs=4 * stdev(column) / math.sqrt(len(column)) + 1e-6)


def expected_wall(run_s: float, mtbf_s: float, save_s: float, restart_s: float, interval_s: float) -> float:
    """Segment by segment: attempts until one succeeds, each failure followed by a restart that may fail too."""

    def lasting(length: float) -> tuple[float, float]:
        """Expected failed attempts before one succeeds, and their mean length."""
        lives = math.exp(-length / mtbf_s)
        if lives == 1:
            return 0.0, 0.0
        return (1 - lives) / lives, mtbf_s - length * lives / (1 - lives)

    failed_restarts, restart_length = lasting(restart_s)
    restart = restart_s + failed_restarts * restart_length
    wall, done = 0.0, 0.0
    while done < run_s - 1e-6:
        part = min(interval_s, run_s - done)
        failed, length = lasting(part + save_s)
        wall += part + save_s + failed * (length + restart)
        done += part
    return wall


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("save_s", [0.5, 20.0, 90.0])
def test_chosen_interval_is_optimal(case: tuple[float, ...], save_s: float) -> None:
    run_s, mtbf_s, _, restart_s, step_s, _ = case
    chosen = of_job(mtbf_s, run_s=run_s, save_s=save_s, restart_s=restart_s, step_s=step_s)
    steps = round(run_s / step_s)
    walls = [expected_wall(run_s, mtbf_s, save_s, restart_s, every * step_s) for every in range(1, steps + 1)]
    assert chosen.interval_steps is not None
    assert chosen.wall_s == pytest.approx(walls[chosen.interval_steps - 1], rel=1e-9)
    assert chosen.wall_s <= 1.01 * min(walls)


@pytest.mark.parametrize(("mtbf_min", "optimum_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_interval_matches_published_optima(mtbf_min: float, optimum_min: float) -> None:
    # Daly 2006, captions of figures 3 to 5: saves of 5 minutes, restarts of 10, 500 hours of work.
    assert daly_interval(5, mtbf_min) == pytest.approx(optimum_min, rel=0.006)
    result = of_job(mtbf_min * 60, run_s=500 * HOUR, save_s=300, restart_s=600, step_s=1)
    assert result.interval_s == pytest.approx(optimum_min * 60, rel=0.01)


@pytest.mark.parametrize("ratio", [1e-4, 0.01, 0.3, 1.0, 1.99, 2.0, 5.0])
def test_daly_interval_is_near_the_exact_optimum(ratio: float) -> None:
    def cost(interval: float) -> float:
        return math.expm1(interval + ratio) / interval

    best = min(cost(math.exp(x / 200)) for x in range(-1200, 400))
    assert cost(daly_interval(ratio, 1.0)) <= 1.002 * best


def test_daly_interval_tends_to_youngs_formula() -> None:
    assert daly_interval(1e-8, 1.0) == pytest.approx(math.sqrt(2e-8), rel=1e-4)


def test_goodput_of_llama_3_matches_its_report() -> None:
    # The Llama 3 Herd of Models (2024), section 3.3: 16,384 GPUs, 419 unexpected interruptions in 54 days, storage that
    # sustains 2 TB/s, effective training time "higher than 90 %". Assumed: 14 bytes per parameter (bf16 weights, f32
    # weights and moments), ten minutes from a failure to the next step, steps of 5 seconds.
    devices, failures, wall_s = 16_384, 419, 54 * DAY
    gpu_hours = devices * wall_s / HOUR / failures
    save_s = save_seconds(405e9 * 14, devices // 8, 2e12)
    assert save_s == pytest.approx(2.835)
    best = goodput(0.92 * wall_s, devices, gpu_hours, save_s, 600, step_s=5)
    assert best.mtbf_s == pytest.approx(3.093 * HOUR, rel=1e-3)
    assert 0.90 < best.share < 0.95
    assert best.failures == pytest.approx(failures, rel=0.01)
    # Saves an hour apart would lose half an hour each time, a sixth of the three hours between failures.
    hourly = goodput(0.92 * wall_s, devices, gpu_hours, save_s, 600, step_s=5, interval_s=HOUR)
    assert 0.70 < hourly.share < 0.85


def test_without_failures_only_saves_cost() -> None:
    known = goodput(1000, 8, None, 5, 60, step_s=2, interval_s=100)
    assert (known.saves, known.wall_s, known.failures, known.mtbf_s) == (10, 1050, 0, math.inf)
    assert known.share == pytest.approx(1000 / 1050)
    assert known.accounts == pytest.approx({"checkpoint stall": 50 / 1050, "rework": 0, "restart": 0})
    assert known.lost_s_per_failure == 0
    rare = goodput(1000, 8, 1e12, 5, 60, step_s=2, interval_s=100)
    assert rare.wall_s == pytest.approx(known.wall_s)


def test_without_rate_or_interval_only_the_last_save_happens() -> None:
    result = goodput(1000, 8, None, 5, 60, step_s=2)
    assert (result.interval_s, result.interval_steps, result.saves, result.wall_s) == (None, None, 1, 1005)
    assert "no failure rate" in result.reason


def test_a_failure_loses_a_restart_and_half_an_interval() -> None:
    # First order, where the interval is short beside the time between failures: 1/2 (100 + 2) + 30.
    result = of_job(1e6, run_s=1e6, save_s=2, restart_s=30, step_s=1, interval_s=100)
    assert result.lost_s_per_failure == pytest.approx(81, rel=1e-3)


def test_free_saves_happen_every_step() -> None:
    assert of_job(1000, run_s=5000, save_s=0, restart_s=10, step_s=2).interval_steps == 1


def test_intervals_are_full_steps_within_the_run() -> None:
    job = {"run_s": 1000.0, "save_s": 5.0, "restart_s": 60.0, "step_s": 7.0}
    assert of_job(500, interval_s=1, **job).interval_steps == 1
    assert of_job(500, interval_s=24, **job).interval_s == 21
    long = of_job(500, interval_s=1e6, **job)
    assert (long.interval_steps, long.saves) == (143, 1)


seconds = st.floats(0.1, 1e5)


@settings(max_examples=examples(200), deadline=None)
@given(seconds, st.floats(50, 1e7), st.floats(0, 100), st.floats(0, 300), st.floats(0.1, 30))
def test_accounts_balance_and_fewer_failures_never_hurt(
    run_s: float, mtbf_s: float, save_s: float, restart_s: float, step_s: float
) -> None:
    job = {"run_s": run_s, "save_s": save_s, "restart_s": restart_s, "step_s": step_s}
    result = of_job(mtbf_s, **job)
    assert result.share + sum(result.accounts.values()) == pytest.approx(1)
    assert all(0 <= share < 1 for share in result.accounts.values())
    assert 0 < result.share <= 1
    lost_s = result.failures * result.lost_s_per_failure
    assert run_s + result.saves * save_s + lost_s == pytest.approx(result.wall_s)
    # Twice the time between failures; the choice of interval may add the error of Daly's formula and of full steps.
    assert of_job(2 * mtbf_s, **job).wall_s <= 1.005 * result.wall_s


def test_save_seconds() -> None:
    # 1,280 GB at 20 GB/s; on a node's own disk of 1.25 GB/s; on 16 nodes that share 0.67 GB/s each.
    assert save_seconds(1280e9, 16, 20e9) == 64
    assert save_seconds(1280e9, 1) == 1024
    assert save_seconds(1280e9, 16) == pytest.approx(1280 / (16 * 0.67))


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="interval_s cannot be 0"):
        goodput(1000, 8, None, 5, 60, step_s=2, interval_s=0)
    with pytest.raises(UsageError, match="save_s cannot be -1"):
        goodput(1000, 8, None, -1, 60, step_s=2)
    with pytest.raises(UsageError, match="never completes"):
        of_job(10, run_s=1e5, save_s=1, restart_s=5, step_s=1, interval_s=1e5)


def test_stall_seconds() -> None:
    # 48 GB at 55 GB/s take 0.87 s, of which steps of 0.8 s hide nine tenths of theirs; measured on an H200: 0.155 s.
    assert stall_seconds(48.2e9, 0.804, gpu=True) == pytest.approx(0.155, rel=0.05)
    assert stall_seconds(48.2e9, 2.0, gpu=True) == pytest.approx(0.005)
    assert stall_seconds(16e9, 10.0, gpu=False) == 2


def test_saves_take_a_tenth_of_storage_time_at_most_and_say_what_binds() -> None:
    def best(save_s: float, step_s: float = 1.0, write_s: float = 0.0, run_s: float = 10 * DAY) -> Goodput:
        return goodput(run_s, 1024, 1000.0, save_s, 60, step_s=step_s, write_s=write_s)

    quick, slow = best(0.01), best(0.01, write_s=300)
    assert (quick.bound, slow.bound) == ("stall", "write bandwidth")
    assert quick.interval_s is not None
    assert quick.interval_s < 100
    assert slow.interval_s is not None
    assert 3000 <= slow.interval_s < 3100
    assert slow.saves * slow.write_s <= 0.1 * slow.wall_s
    assert best(100.0, write_s=30).interval_s == best(100.0).interval_s, "stalls cost more than storage"
    assert best(0.01, step_s=1e4).bound == "step"
    assert best(0.01, write_s=300, run_s=1000.0).bound == "run"


def test_a_large_state_is_not_saved_in_every_step() -> None:
    # llama3-70b on eight nodes: 850 GB of state, steps of 135 s, one failure in 33 days. A save takes 850 / 5.36 s.
    advice = goodput(30 * DAY, 64, 50_700.0, 0.005, 120, step_s=135, write_s=save_seconds(850e9, 8))
    assert advice.bound == "write bandwidth"
    assert advice.interval_steps == math.ceil(850 / (8 * 0.67) * 10 / 135) == 12


def test_checkpoints_are_bound_by_what_storage_holds() -> None:
    def storage(terabytes: float, keep_last: int = 2, every: int = 0) -> CheckpointStorage:
        return CheckpointStorage(1e12, 10_000, keep_last, every, terabytes * 1e12)

    assert storage(3).advice is None
    assert storage(2.9).advice == "checkpoint.keep_last=1 fits"
    assert "does not hold two" in str(storage(1.9).advice)
    assert storage(8, every=1000).advice == "checkpoint.keep_every_steps=2000 fits"
    assert storage(8, every=2000).advice is None
    assert storage(3, every=2000).advice == "checkpoint.keep_last=2, keep_every_steps=0 fits"


@given(
    st.floats(0.005, 100), st.floats(0, 5000), st.floats(0.1, 500), st.integers(1, 10**5), st.integers(1, 10**5)
)  # fmt: skip
@settings(max_examples=examples(100), deadline=None)
def test_advice_never_writes_for_more_than_its_share(
    save_s: float, write_s: float, step_s: float, devices: int, steps: int
) -> None:
    advice = goodput(steps * step_s, devices, 50_000.0, save_s, 0, step_s=step_s, write_s=write_s)
    assert advice.interval_s is not None
    assert advice.interval_steps == steps or advice.interval_s * 0.1 >= write_s * (1 - 1e-6)


def simulate_durability(random: Random, run_s: float, mtbf_s: float, interval_s: float, write_s: float) -> float:
    """The wall time of a run that saves without stall or restart, every save durable `write_s` after it began."""
    clock, work, saves = 0.0, 0.0, [(0.0, 0.0)]  # when durable, and the work in it
    failure_at = random.expovariate(1 / mtbf_s)
    while work < run_s:
        due = min(run_s, (math.floor(work / interval_s + 1e-9) + 1) * interval_s)
        if clock + (due - work) > failure_at:
            clock = failure_at
            saves = [(at, saved) for at, saved in saves if at <= clock]
            work, failure_at = saves[-1][1], clock + random.expovariate(1 / mtbf_s)
            continue
        clock, work = clock + (due - work), due
        saves.append((clock + write_s, work))
    return clock


def test_work_done_while_a_save_is_written_is_lost_with_it() -> None:
    random, run_s, mtbf_s = Random(3), 40_000.0, 8_000.0
    for interval_s, write_s in ((400.0, 0.0), (400.0, 200.0), (400.0, 390.0)):
        walls = [simulate_durability(random, run_s, mtbf_s, interval_s, write_s) for _ in range(1500)]
        result = of_job(mtbf_s, run_s=run_s, save_s=0, restart_s=0, step_s=1, interval_s=interval_s, write_s=write_s)
        lost = mean(walls) - run_s
        assert result.wall_s - run_s == pytest.approx(lost, rel=0.06, abs=4 * stdev(walls) / math.sqrt(len(walls)))


def test_save_interval_follows_cost_and_observed_failures() -> None:
    # Young: sqrt(2 x 0.1 s x (50,000 h / 8)) = 2,121 s; Daly's correction is below a percent for so short a save.
    assert save_interval(0.1, 8, 50_000) == pytest.approx(2121, rel=0.01)
    assert save_interval(0.4, 8, 50_000) == pytest.approx(2 * save_interval(0.1, 8, 50_000), rel=0.01)
    # Four failures in an hour: one in 900 s, whatever the expected rate is.
    assert save_interval(0.1, 8, 50_000, failures=4, seconds=3600) == pytest.approx((2 * 0.1 * 900) ** 0.5, rel=0.02)
    # One failure in a long time does not make it save less often than expected.
    assert save_interval(0.1, 8, 50_000, failures=1, seconds=1e12) == save_interval(0.1, 8, 50_000)
