"""Synthetic traces have the statistics of the published summary, which is copied here."""

import numpy as np
import pytest

from headway.cluster.simulate import JobTrace, generate_trace
from headway.errors import UsageError

# id, gpu_job_num, avg_run_time_gpu, med_run_time_gpu, max_run_time_gpu, avg_gpu_num, med_gpu_num, max_gpu,
# complete_gpu_time, cancel_gpu_time, fail_gpu_time of acme_cluster_summary.csv
SUMMARY = {
    "acme-like": (19907, 1259.689, 124.0, 625740.0, 26.77, 1.0, 1024, 1667685146.0, 3239202064.0, 426292851.0),
    "seren-like": (663813, 1414.335, 122.0, 1209604.0, 5.68, 1.0, 1024, 4560592618.0, 14274584510.0, 2675447459.0),
}
JOBS, GPUS = 20_000, 6776


@pytest.fixture(scope="module", params=sorted(SUMMARY))
def generated(request: pytest.FixtureRequest) -> tuple[str, JobTrace]:
    return request.param, generate_trace(request.param, GPUS, JOBS, seed=3)


def test_run_times_and_gang_sizes_match_the_summary(generated: tuple[str, JobTrace]) -> None:
    name, trace = generated
    count, mean_s, median_s, longest_s, gpus, median_gpus, largest, *gpu_s = SUMMARY[name]
    assert trace.duration_s.mean() == pytest.approx(mean_s, rel=0.06)
    assert np.median(trace.duration_s) == pytest.approx(median_s, rel=0.03)
    assert 0.3 * longest_s < trace.duration_s.max() <= longest_s
    assert trace.gpus.mean() == pytest.approx(gpus, rel=0.02)
    assert np.median(trace.gpus) == median_gpus
    assert trace.gpus.max() == largest
    # the heaviest few jobs are most of this one
    assert (trace.duration_s * trace.gpus).mean() == pytest.approx(sum(gpu_s) / count, rel=0.15)


def test_generated_trace_is_valid(generated: tuple[str, JobTrace]) -> None:
    _, trace = generated
    assert len(set(trace.names)) == len(trace) == JOBS
    assert (np.diff(trace.submit_s) >= 0).all()
    assert trace.submit_s[0] >= 0
    assert (trace.duration_s >= 1).all()
    assert set(trace.tenant.tolist()) == set(range(len(trace.tenants)))


def test_load_of_the_cluster_is_as_requested(generated: tuple[str, JobTrace]) -> None:
    _, trace = generated
    asked = float((trace.duration_s * trace.gpus).sum())
    assert asked / (GPUS * trace.submit_s[-1]) == pytest.approx(0.8, rel=0.03)


def test_more_jobs_arrive_by_day_than_by_night() -> None:
    """Two thirds and four thirds of the mean at the ends: within six hours of noon 1 + 2 / (3 pi) of it."""
    trace = generate_trace("acme-like", GPUS, JOBS, seed=4)
    whole = trace.submit_s[trace.submit_s < trace.submit_s[-1] // 86400 * 86400]
    hour = whole % 86400 / 3600
    assert ((hour > 6) & (hour < 18)).mean() == pytest.approx(0.5 * (1 + 2 / (3 * np.pi)), abs=0.02)


def test_trace_is_deterministic_per_seed() -> None:
    first, same, other = (generate_trace("acme-like", GPUS, 500, seed=seed) for seed in (1, 1, 2))
    assert first.duration_s.tobytes() == same.duration_s.tobytes()
    assert first.submit_s.tobytes() == same.submit_s.tobytes()
    assert first.duration_s.tobytes() != other.duration_s.tobytes()


@pytest.mark.parametrize(
    ("name", "gpus", "message"),
    [("none-like", GPUS, "unknown workload 'none-like'"), ("acme-like", 512, "gangs of 1,024 GPUs")],
)
def test_unknown_workload_or_too_small_cluster_is_rejected(name: str, gpus: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate_trace(name, gpus)


def test_single_gpu_workload_has_long_jobs_and_few_whole_node_gangs() -> None:
    trace = generate_trace("single-gpu", 32, seed=1)
    gangs = trace.gpus > 1
    assert len(trace) == 4000
    assert set(trace.gpus.tolist()) == {1, 8, 16}
    assert gangs.sum() == 40
    assert 0.01 < (trace.duration_s[~gangs] > 86400).mean() < 0.03
    requested = float((trace.duration_s * trace.gpus).sum()) / (32 * (trace.submit_s[-1] - trace.submit_s[0]))
    assert 0.68 < requested < 0.72
