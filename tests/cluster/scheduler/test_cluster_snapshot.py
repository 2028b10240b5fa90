"""The snapshot against a naive model with dicts, its JSON form, and jobs that it rejects."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.nodes import DRAINING, HEALTHY, QUARANTINED, SPARE
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.errors import UsageError
from thinned import examples

POOLS = {"h100": (4, ["h0", "h1"]), "a100": (2, ["a0", "a1", "a2"])}
PARENTS = {"org": None, "red": "org", "blue": None}


def small_cluster() -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", *POOLS["h100"], {"rack": ["r0", "r1"]})
    snapshot.nodes.add_pool("a100", *POOLS["a100"])
    snapshot.tenants.add_tenant("org", 6)
    snapshot.tenants.add_tenant("red", 4, "org")
    snapshot.tenants.add_tenant("blue", 2, borrow=4)
    return snapshot


def one_node(gpus: int = 8) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", gpus, ["n0"])
    snapshot.tenants.add_tenant("all", gpus)
    return snapshot


def start_first_fit(snapshot: ClusterSnapshot, row: int) -> bool:
    """Start a job in the first pool where it fits."""
    for number, pool in enumerate(snapshot.nodes.pools):
        placement = snapshot.nodes.free_gpus(pool).find(int(snapshot.jobs.gpus[row]))
        if placement is not None:
            snapshot.start(row, number, placement)
            return True
    return False


def names(snapshot: ClusterSnapshot, rows: Any) -> list[str]:
    return [snapshot.jobs.names[row] for row in rows.tolist()]


def describe(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """Return all values of a snapshot, with names in place of row numbers."""
    jobs, nodes, tenants = snapshot.jobs, snapshot.nodes, snapshot.tenants
    records = {}
    for name, row in jobs.rows.items():
        record = jobs.record(row) | {"tenant": tenants.names[jobs.tenant[row]]}
        records[name] = {key: "nan" if value != value else value for key, value in record.items()}
        if row in snapshot.placements:
            pool, placement = snapshot.placements[row]
            records[name]["place"] = (pool, placement.nodes.tolist(), placement.gpus.tolist())
    return {
        "now": snapshot.now_s,
        "pools": nodes.pools,
        "domains": [nodes.domains(pool.number) for pool in nodes.pools],
        "nodes": [nodes.record(row) for row in range(len(nodes))],
        "tenants": [tenants.record(row) | {"path": tenants.path(row).tolist()} for row in range(len(tenants))],
        "jobs": records,
        "queue": names(snapshot, snapshot.queue),
        "active": names(snapshot, snapshot.active),
    }


class SnapshotMachine(RuleBasedStateMachine):
    """Jobs are submitted, started, stopped and ended in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshot = small_cluster()
        self.now, self.count = 0, 0
        self.jobs = dict[str, dict[str, Any]]()
        self.queue, self.active = list[str](), list[str]()
        self.away = set[str]()

    def row(self, name: str) -> int:
        return self.snapshot.jobs.rows[name]

    @rule(seconds=st.integers(0, 5000))
    def advance(self, seconds):
        self.now += seconds
        self.snapshot.advance(float(self.now))

    @rule(
        gap=st.integers(1, 3),
        gpus=st.integers(1, 6),
        tenant=st.sampled_from(sorted(PARENTS)),
        priority=st.integers(-2, 2),
        every=st.sampled_from([100, 1800]),
        restart=st.sampled_from([0, 120]),
        limit=st.sampled_from([50.0, math.inf]),
    )
    def submit_job(self, gap, gpus, tenant, priority, every, restart, limit):
        self.advance(gap)
        self.count += 1
        name = f"job-{self.count}"
        job = Job(name, tenant, gpus, float(self.now), priority, gpus % 2 == 0, limit, float(every), float(restart))
        self.snapshot.submit([job])
        fresh = {"job": job, "since": None, "ran": 0, "done": 0, "starts": 0, "number": self.count}
        self.jobs[name] = fresh
        self.queue.append(name)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def start_job(self, data):
        name = data.draw(st.sampled_from(self.queue))
        if start_first_fit(self.snapshot, self.row(name)):
            self.queue.remove(name)
            self.active.append(name)
            self.jobs[name] |= {"since": self.now, "starts": self.jobs[name]["starts"] + 1}

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def stop_job(self, data):
        name = data.draw(st.sampled_from(self.active))
        job = self.jobs[name]
        job |= {"ran": job["ran"] + self.now - job["since"], "done": self.saved(name), "since": None}
        self.snapshot.stop([self.row(name)], float(job["done"]))
        self.active.remove(name)
        self.queue = sorted([*self.queue, name], key=lambda name: self.jobs[name]["number"])

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def end_job(self, data):
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        self.snapshot.end(self.row(name))
        del self.jobs[name]
        self.queue, self.active = ([other for other in line if other != name] for line in (self.queue, self.active))

    @rule(name=st.sampled_from(["h0", "h1", "a2"]), state=st.sampled_from([HEALTHY, DRAINING, QUARANTINED, SPARE]))
    def change_node_state(self, name, state):
        self.snapshot.nodes.state[self.snapshot.nodes.rows[name]] = state
        (self.away.discard if state == HEALTHY else self.away.add)(name)

    def worked(self, name: str) -> int:
        job = self.jobs[name]
        late = job["job"].restart_s if job["starts"] > 1 else 0
        return job["done"] + max(self.now - job["since"] - late, 0)

    def saved(self, name: str) -> int:
        job = self.jobs[name]
        every = int(job["job"].save_every_s)
        return job["done"] + int(self.worked(name) - job["done"]) // every * every

    @rule()
    def check(self):
        """Not an invariant: checking after each step would hide what is only updated when it is read."""
        self.check_order()
        self.check_gpus()
        self.check_progress()
        self.check_json()

    teardown = check

    def check_order(self) -> None:
        assert names(self.snapshot, self.snapshot.queue) == self.queue
        assert names(self.snapshot, self.snapshot.active) == self.active
        assert set(self.snapshot.jobs.rows) == set(self.jobs)
        assert {self.snapshot.jobs.names[row] for row in self.snapshot.placements} == set(self.active)

    def check_gpus(self) -> None:
        nodes, tenants = self.snapshot.nodes, self.snapshot.tenants
        taken = dict.fromkeys(nodes.names, 0)
        for row, (pool, place) in self.snapshot.placements.items():
            assert place.total == self.snapshot.jobs.gpus[row], "a gang holds all its GPUs"
            for node, gpus in zip(place.nodes.tolist(), place.gpus.tolist(), strict=True):
                taken[nodes.names[nodes.pools[pool].first + node]] += gpus
        for number, (chip, (size, node_names)) in enumerate(POOLS.items()):
            assert nodes.pools[number].chip == chip
            for name in node_names:
                assert 0 <= taken[name] <= size, "more GPUs than exist"
                assert nodes.free[nodes.rows[name]] == size - taken[name]
            usable = [0 if name in self.away else size - taken[name] for name in node_names]
            assert nodes.free_gpus(nodes.pools[number]).free.tolist() == usable
        used = dict.fromkeys(PARENTS, 0)
        for name in self.active:
            job = self.jobs[name]["job"]
            for tenant in {job.tenant, PARENTS[job.tenant]} - {None}:
                used[tenant] += job.gpus
        assert dict(zip(tenants.names, tenants.used.tolist(), strict=False)) == used

    def check_progress(self) -> None:
        snapshot = self.snapshot
        rows = np.array([self.row(name) for name in self.jobs], np.int64)
        held = [job["ran"] + (self.now - job["since"] if job["since"] is not None else 0) for job in self.jobs.values()]
        assert snapshot.held_s(rows, float(self.now)).tolist() == held
        assert snapshot.worked_s(snapshot.active, float(self.now)).tolist() == [
            self.worked(name) for name in self.active
        ]
        assert snapshot.saved_s(snapshot.active, float(self.now)).tolist() == [self.saved(name) for name in self.active]
        for name, job in self.jobs.items():
            record = snapshot.jobs.record(self.row(name))
            assert (record["done_s"], record["starts"]) == (job["done"], job["starts"])
            assert record["running"] == (name in self.active)
            for key in ("gpus", "priority", "preemptible", "submit_s", "limit_s", "save_every_s", "restart_s"):
                assert record[key] == getattr(job["job"], key)

    def check_json(self) -> None:
        text = self.snapshot.to_json()
        read = ClusterSnapshot.from_json(text)
        assert describe(read) == describe(self.snapshot)
        assert read.to_json() == text


class LongSnapshotMachine(SnapshotMachine):
    """The same, with more examples."""


# no shrinking: it takes minutes
UNSHRUNK = settings(
    max_examples=examples(40),
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
test_snapshot_matches_a_model_after_any_events = SnapshotMachine.TestCase
test_snapshot_matches_a_model_after_any_events.settings = UNSHRUNK
test_snapshot_matches_a_model_after_many_events = pytest.mark.slow(LongSnapshotMachine.TestCase)
test_snapshot_matches_a_model_after_many_events.settings = settings(UNSHRUNK, max_examples=examples(200))


# -- single events


def test_job_in_a_reused_row_is_queued_once():
    snapshot = one_node()
    (row,) = snapshot.submit([Job("old", "all", 1)])
    start_first_fit(snapshot, row)
    snapshot.end(row)
    assert snapshot.submit([Job("new", "all", 1)]) == [row]
    assert names(snapshot, snapshot.queue) == ["new"]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=8))
def test_stopped_jobs_wait_in_order_of_submission(times, stops):
    """Jobs submitted at the same time keep their order."""
    snapshot, times = one_node(), sorted(times)
    rows = snapshot.submit([Job(f"job-{number}", "all", 1, float(at)) for number, at in enumerate(times)])
    for number in stops:
        row = rows[number % len(rows)]
        start_first_fit(snapshot, row)
        snapshot.stop([row], 0.0)
    assert snapshot.queue.tolist() == rows


def test_queue_is_sorted_by_submit_time_in_whatever_order_jobs_are_submitted():
    snapshot = one_node()
    snapshot.submit([Job("late", "all", 1, submit_s=9.0), Job("early", "all", 1, submit_s=3.0)])
    snapshot.submit([Job("middle", "all", 1, submit_s=5.0)])
    assert names(snapshot, snapshot.queue) == ["early", "middle", "late"]


def test_time_does_not_go_back():
    snapshot = one_node()
    snapshot.advance(5.0)
    snapshot.advance(5.0)
    with pytest.raises(AssertionError, match="time does not go back"):
        snapshot.advance(4.0)


def test_gpus_are_never_given_twice_and_gangs_are_all_or_nothing():
    snapshot = one_node()
    a, b = snapshot.submit([Job("a", "all", 6), Job("b", "all", 4)])
    placement = snapshot.nodes.free_gpus(snapshot.nodes.pools[0]).find(6)
    other = snapshot.nodes.free_gpus(snapshot.nodes.pools[0]).find(4)
    assert placement is not None
    assert other is not None
    with pytest.raises(AssertionError, match="all GPUs or none"):
        snapshot.start(b, 0, placement)
    snapshot.start(a, 0, placement)
    with pytest.raises(AssertionError, match="GPUs are never given twice"):
        snapshot.start(b, 0, other)
    assert snapshot.nodes.free.tolist()[:1] == [2]
    assert snapshot.tenants.used[0] == 6


def test_running_job_cannot_be_started_again():
    snapshot = one_node()
    (row,) = snapshot.submit([Job("a", "all", 2)])
    start_first_fit(snapshot, row)
    with pytest.raises(AssertionError):
        start_first_fit(snapshot, row)


def test_recent_usage_of_tenants_grows_over_time():
    snapshot = one_node()
    start_first_fit(snapshot, *snapshot.submit([Job("a", "all", 4)]))
    snapshot.advance(100.0)
    assert snapshot.tenants.recent[0] == pytest.approx(400.0, rel=1e-3)


def test_job_that_never_saves_has_nothing_saved():
    snapshot = one_node()
    (row,) = snapshot.submit([Job("a", "all", 4, save_every_s=math.inf)])
    start_first_fit(snapshot, row)
    snapshot.advance(100.0)
    assert snapshot.saved_s(snapshot.active, 100.0).tolist() == [0.0]


def test_job_that_never_saves_survives_json():
    snapshot = one_node()
    snapshot.submit([Job("a", "all", 4, save_every_s=math.inf)])
    assert describe(ClusterSnapshot.from_json(snapshot.to_json())) == describe(snapshot)


# -- nodes that fail


def test_failed_node_stops_its_jobs_and_is_replaced_by_a_spare():
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 4, ["n0", "n1", "n2", "n3"])
    snapshot.nodes.state[3] = SPARE
    snapshot.tenants.add_tenant("all", 16)
    wide, narrow, other = snapshot.submit(
        [Job("wide", "all", 6), Job("narrow", "all", 1, 1.0), Job("other", "all", 4, 2.0)]
    )
    for row in (wide, narrow, other):
        start_first_fit(snapshot, row)
    snapshot.advance(2000.0)
    assert set(snapshot.fail(1)) == {wide, narrow}
    assert names(snapshot, snapshot.queue) == ["wide", "narrow"]
    assert names(snapshot, snapshot.active) == ["other"]
    assert snapshot.nodes.state.tolist()[:4] == [HEALTHY, QUARANTINED, HEALTHY, HEALTHY]
    assert snapshot.nodes.free_gpus(snapshot.nodes.pools[0]).free.tolist() == [4, 0, 0, 4]
    assert snapshot.jobs.done_s[wide] == 1800.0
    assert snapshot.tenants.used[0] == 4
    assert describe(ClusterSnapshot.from_json(snapshot.to_json())) == describe(snapshot)
    snapshot.repair(1)
    assert snapshot.nodes.free_gpus(snapshot.nodes.pools[0]).free.tolist() == [4, 4, 0, 4]


def test_failed_spare_is_not_replaced():
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 4, ["n0", "n1", "n2"])
    snapshot.nodes.state[1:3] = SPARE
    assert snapshot.fail(1) == []
    assert snapshot.nodes.state.tolist()[:3] == [HEALTHY, QUARANTINED, SPARE]


def test_job_that_would_need_a_spare_is_rejected():
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 4, ["n0", "n1"], spares=1)
    snapshot.tenants.add_tenant("all", 4)
    with pytest.raises(UsageError, match="job j requests 8 GPUs"):
        snapshot.submit([Job("j", "all", 8)])


# -- rejected jobs


@pytest.mark.parametrize(
    ("name", "job", "message", "hint"),
    [
        ("no GPUs", Job("j", "org", 0), "job j requests 0 GPUs", "whole number"),
        ("negative GPUs", Job("j", "org", -4), "job j requests -4 GPUs", "whole number"),
        ("part of a GPU", Job("j", "org", 1.5), "job j requests 1.5 GPUs", "whole number"),  # type: ignore[arg-type]
        ("not a number", Job("j", "org", math.nan), "job j requests nan GPUs", "whole number"),
        ("infinite", Job("j", "org", math.inf), "job j requests inf GPUs", "whole number"),
        ("unknown tenant", Job("j", "green", 1), "job j: unknown tenant 'green'", "org, red, blue"),
        ("duplicate", Job("old", "org", 1), "duplicate job 'old'", None),
        ("above all nodes", Job("j", "org", 15), "job j requests 15 GPUs", "at most 8"),
        ("above every pool", Job("j", "org", 9), "job j requests 9 GPUs", "at most 8"),
        ("above its borrowing", Job("j", "blue", 7), "job j requests 7 GPUs; blue may use 6", "at most 6"),
        ("above every domain", Job("j", "org", 7, within="rack"), "job j requests 7 GPUs within one rack", "at most 6"),
        ("unknown network level", Job("j", "org", 1, within="row"), "job j: unknown network level 'row'", "rack"),
        ("negative limit", Job("j", "org", 1, limit_s=-1.0), "job j", None),
        ("limit is not a number", Job("j", "org", 1, limit_s=math.nan), "job j", None),
        ("submit time is not a number", Job("j", "org", 1, math.nan), "job j", None),
        ("no time between saves", Job("j", "org", 1, save_every_s=0.0), "job j", None),
        ("negative restart time", Job("j", "org", 1, restart_s=-1.0), "job j", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_job_that_can_never_run_is_rejected_with_the_nearest_that_could(name, job, message, hint):
    snapshot = small_cluster()
    snapshot.submit([Job("old", "org", 1)])
    before = describe(snapshot)
    with pytest.raises(UsageError) as error:
        snapshot.submit([job])
    assert error.value.message.startswith(message)
    assert "\n" not in error.value.message
    assert hint is None or hint in (error.value.hint or "")
    assert describe(snapshot) == before


@pytest.mark.parametrize("tenant", ["org", "red", "blue"])
def test_the_hinted_size_is_accepted_and_fits(tenant):
    """All accepted sizes fit the empty cluster, and the hint names the largest of them."""
    accepted, hints = [], set()
    for gpus in range(1, 20):
        snapshot = small_cluster()
        try:
            (row,) = snapshot.submit([Job("j", tenant, gpus)])
        except UsageError as error:
            hints.add(error.hint)
        else:
            accepted.append(gpus)
            if not start_first_fit(snapshot, row):
                pytest.fail(f"{gpus} GPUs were accepted but never fit")
    assert accepted == list(range(1, len(accepted) + 1))
    assert all(str(len(accepted)) in hint for hint in hints)


def test_job_that_needs_gpus_not_lent_is_rejected():
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 8, ["n0"])
    snapshot.tenants.add_tenant("a", 4)
    snapshot.tenants.add_tenant("b", 4, lend=0)
    with pytest.raises(UsageError, match="job j requests 8 GPUs"):
        snapshot.submit([Job("j", "a", 8)])


def test_several_jobs_are_queued_all_or_none():
    snapshot = one_node()
    with pytest.raises(UsageError):
        snapshot.submit([Job("good", "all", 1), Job("bad", "all", 99)])
    assert names(snapshot, snapshot.queue) == list(snapshot.jobs.rows) == []
    snapshot.submit([Job("good", "all", 1)])


@pytest.mark.parametrize("size", [-1, 1.5])
def test_nodes_need_a_whole_number_of_gpus(size):
    with pytest.raises(UsageError, match=f"{size} GPUs"):
        ClusterSnapshot().nodes.add_pool("h100", size, ["n0"])


def test_several_nodes_are_added_all_or_none():
    snapshot = one_node()
    with pytest.raises(UsageError, match="duplicate node 'n0'"):
        snapshot.nodes.add_pool("h100", 8, ["n1", "n0"])
    assert len(snapshot.nodes) == 1
    pool = snapshot.nodes.add_pool("h100", 8, ["n1"])
    assert (pool.first, pool.end) == (1, 2)


@pytest.mark.parametrize("domains", [{"rack": ["r0"]}, {"block": ["b0", "b0"]}])
def test_mismatched_domains_are_rejected(domains):
    snapshot = small_cluster()
    before = describe(snapshot)
    with pytest.raises(UsageError):
        snapshot.nodes.add_pool("b200", 8, ["b0", "b1"], domains)
    assert describe(snapshot) == before


# -- JSON


def snapshot_values() -> dict[str, Any]:
    snapshot = small_cluster()
    rows = snapshot.submit([Job("a", "red", 3), Job("b", "blue", 6), Job("c", "org", 1)])
    for row in rows[:2]:
        start_first_fit(snapshot, row)
    values: dict[str, Any] = json.loads(snapshot.to_json())
    return values


def test_json_is_strict():
    """Other readers reject NaN and Infinity, and a job without a limit, started or not, has both."""
    snapshot = one_node()
    rows = snapshot.submit([Job("a", "all", 8), Job("b", "all", 1)])
    assert start_first_fit(snapshot, rows[0])
    assert np.isinf(snapshot.jobs.limit_s[rows]).all()
    constants: list[str] = []
    values = json.loads(snapshot.to_json(), parse_constant=constants.append)
    assert constants == []
    assert [job["limit_s"] for job in values["jobs"]] == ["inf", "inf"]


def test_restored_snapshot_can_be_updated():
    restored = ClusterSnapshot.from_json(json.dumps(snapshot_values()))
    restored.end(restored.jobs.rows["a"])
    restored.stop([restored.jobs.rows["b"]], 0.0)
    restored.submit([Job("d", "org", 1, submit_s=1.0)])
    assert names(restored, restored.queue)[-1] == "d"
    assert set(names(restored, restored.queue)) == {"b", "c", "d"}
    assert (restored.nodes.free == restored.nodes.gpus).all()
    assert not restored.tenants.used.any()


def without_key(key: str) -> Any:
    return lambda values: values.pop(key)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("another format", lambda values: values.update(format=2)),
        ("no format", without_key("format")),
        ("duplicate tenant", lambda values: values["tenants"].append(values["tenants"][0])),
        ("cycle of tenants", lambda values: values["tenants"][0].update(parent="red")),
        ("duplicate node", lambda values: values["pools"].append(values["pools"][0])),
        ("a negative guarantee", lambda values: values["tenants"][0].update(guarantee=-1)),
        ("no tenants", without_key("tenants")),
        ("duplicate job", lambda values: values["jobs"].append(values["jobs"][0])),
        ("unknown tenant of a job", lambda values: values["jobs"][0].update(tenant="green")),
        ("unknown node state", lambda values: values["pools"][0].update(state=["good", "bad"])),
        (
            "two jobs on the same GPUs",
            lambda values: values["jobs"][1].update(place=values["jobs"][2]["place"]),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_snapshot_is_rejected_in_one_sentence(name, change):
    values = snapshot_values()
    change(values)
    with pytest.raises(UsageError) as error:
        ClusterSnapshot.from_json(json.dumps(values))
    assert "\n" not in error.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"format"'])
def test_invalid_json_is_rejected(text):
    with pytest.raises(UsageError):
        ClusterSnapshot.from_json(text)


def test_copy_of_a_snapshot_is_independent() -> None:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 4, ["a", "b"])
    snapshot.tenants.add_tenant("red", 8)
    first, second = snapshot.submit([Job("first", "red", 4, user="ann"), Job("second", "red", 4)])
    snapshot.start(first, 0, Placement(np.array([0], np.int32), np.array([4], np.int32)))
    before = snapshot.to_json()
    copy = snapshot.copy()
    assert copy.to_json() == before
    copy.advance(5000.0)
    copy.start(second, 0, Placement(np.array([1], np.int32), np.array([4], np.int32)))
    copy.end(first)
    copy.submit([Job("third", "red", 1)])
    copy.fail(1)
    assert copy.to_json() != before
    assert snapshot.to_json() == before
