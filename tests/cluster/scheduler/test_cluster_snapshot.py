"""The snapshot against a naive model with dicts, its JSON form, and jobs that it refuses."""

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


def small() -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", *POOLS["h100"], {"rack": ["r0", "r1"]})
    snapshot.nodes.join("a100", *POOLS["a100"])
    snapshot.tenants.join("org", 6)
    snapshot.tenants.join("red", 4, "org")
    snapshot.tenants.join("blue", 2, borrow=4)
    return snapshot


def one_node(gpus: int = 8) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", gpus, ["n0"])
    snapshot.tenants.join("all", gpus)
    return snapshot


def begin(snapshot: ClusterSnapshot, row: int) -> bool:
    """Start a job at the first place there is."""
    for number, pool in enumerate(snapshot.nodes.pools):
        place = snapshot.nodes.room(pool).find(int(snapshot.jobs.gpus[row]))
        if place is not None:
            snapshot.start(row, number, place)
            return True
    return False


def names(snapshot: ClusterSnapshot, rows: Any) -> list[str]:
    return [snapshot.jobs.names[row] for row in rows.tolist()]


def everything(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """All that a snapshot says, with names in place of row numbers."""
    jobs, nodes, tenants = snapshot.jobs, snapshot.nodes, snapshot.tenants
    found = {}
    for name, row in jobs.rows.items():
        record = jobs.record(row) | {"tenant": tenants.names[jobs.tenant[row]]}
        found[name] = {key: "nan" if value != value else value for key, value in record.items()}
        if row in snapshot.places:
            pool, place = snapshot.places[row]
            found[name]["place"] = (pool, place.nodes.tolist(), place.gpus.tolist())
    return {
        "now": snapshot.now_s,
        "pools": nodes.pools,
        "domains": [nodes.domains(pool.number) for pool in nodes.pools],
        "nodes": [nodes.record(row) for row in range(len(nodes))],
        "tenants": [tenants.record(row) | {"path": tenants.path(row).tolist()} for row in range(len(tenants))],
        "jobs": found,
        "queue": names(snapshot, snapshot.queue),
        "active": names(snapshot, snapshot.active),
    }


class Lives(RuleBasedStateMachine):
    """Jobs come, start, are stopped and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshot = small()
        self.now, self.count = 0, 0
        self.jobs = dict[str, dict[str, Any]]()
        self.queue, self.active = list[str](), list[str]()
        self.away = set[str]()

    def row(self, name: str) -> int:
        return self.snapshot.jobs.rows[name]

    @rule(seconds=st.integers(0, 5000))
    def time_passes(self, seconds):
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
    def a_job_comes(self, gap, gpus, tenant, priority, every, restart, limit):
        self.time_passes(gap)
        self.count += 1
        name = f"job-{self.count}"
        job = Job(name, tenant, gpus, float(self.now), priority, gpus % 2 == 0, limit, float(every), float(restart))
        self.snapshot.submit([job])
        fresh = {"job": job, "since": None, "ran": 0, "done": 0, "starts": 0, "number": self.count}
        self.jobs[name] = fresh
        self.queue.append(name)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def a_job_starts(self, data):
        name = data.draw(st.sampled_from(self.queue))
        if begin(self.snapshot, self.row(name)):
            self.queue.remove(name)
            self.active.append(name)
            self.jobs[name] |= {"since": self.now, "starts": self.jobs[name]["starts"] + 1}

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def a_job_is_stopped(self, data):
        name = data.draw(st.sampled_from(self.active))
        job = self.jobs[name]
        job |= {"ran": job["ran"] + self.now - job["since"], "done": self.saved(name), "since": None}
        self.snapshot.stop(self.row(name), float(job["done"]))
        self.active.remove(name)
        self.queue = sorted([*self.queue, name], key=lambda name: self.jobs[name]["number"])

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def a_job_ends(self, data):
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        self.snapshot.end(self.row(name))
        del self.jobs[name]
        self.queue, self.active = ([other for other in line if other != name] for line in (self.queue, self.active))

    @rule(name=st.sampled_from(["h0", "h1", "a2"]), state=st.sampled_from([HEALTHY, DRAINING, QUARANTINED, SPARE]))
    def a_node_changes(self, name, state):
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
    def somebody_looks(self):
        """Not after each step: what is only put right when somebody looks would never be seen wrong."""
        self.order_is_right()
        self.gpus_are_right()
        self.progress_is_right()
        self.json_says_it_all()

    teardown = somebody_looks

    def order_is_right(self) -> None:
        assert names(self.snapshot, self.snapshot.queue) == self.queue
        assert names(self.snapshot, self.snapshot.active) == self.active
        assert set(self.snapshot.jobs.rows) == set(self.jobs)
        assert {self.snapshot.jobs.names[row] for row in self.snapshot.places} == set(self.active)

    def gpus_are_right(self) -> None:
        nodes, tenants = self.snapshot.nodes, self.snapshot.tenants
        taken = dict.fromkeys(nodes.names, 0)
        for row, (pool, place) in self.snapshot.places.items():
            assert place.total == self.snapshot.jobs.gpus[row], "a gang is whole"
            for node, gpus in zip(place.nodes.tolist(), place.gpus.tolist(), strict=True):
                taken[nodes.names[nodes.pools[pool].first + node]] += gpus
        for number, (chip, (size, there)) in enumerate(POOLS.items()):
            assert nodes.pools[number].chip == chip
            for name in there:
                assert 0 <= taken[name] <= size, "more than there are"
                assert nodes.free[nodes.rows[name]] == size - taken[name]
            usable = [0 if name in self.away else size - taken[name] for name in there]
            assert nodes.room(nodes.pools[number]).free.tolist() == usable
        used = dict.fromkeys(PARENTS, 0)
        for name in self.active:
            job = self.jobs[name]["job"]
            for tenant in {job.tenant, PARENTS[job.tenant]} - {None}:
                used[tenant] += job.gpus
        assert dict(zip(tenants.names, tenants.used.tolist(), strict=False)) == used

    def progress_is_right(self) -> None:
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

    def json_says_it_all(self) -> None:
        text = self.snapshot.to_json()
        read = ClusterSnapshot.from_json(text)
        assert everything(read) == everything(self.snapshot)
        assert read.to_json() == text


class MoreLives(Lives):
    """The same, many times."""


# Not made smaller when it fails: that takes minutes.
AS_FOUND = settings(
    max_examples=examples(40),
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
test_a_snapshot_is_right_after_anything_that_happens = Lives.TestCase
test_a_snapshot_is_right_after_anything_that_happens.settings = AS_FOUND
test_a_snapshot_is_right_after_much_that_happens = pytest.mark.slow(MoreLives.TestCase)
test_a_snapshot_is_right_after_much_that_happens.settings = settings(AS_FOUND, max_examples=examples(200))


# -- one at a time


def test_a_job_in_the_row_of_one_that_has_ended_waits_once():
    snapshot = one_node()
    (row,) = snapshot.submit([Job("old", "all", 1)])
    begin(snapshot, row)
    snapshot.end(row)
    assert snapshot.submit([Job("new", "all", 1)]) == [row]
    assert names(snapshot, snapshot.queue) == ["new"]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=8))
def test_jobs_that_are_stopped_wait_as_they_came(times, stops):
    """Some came together; those keep the order in which they were told."""
    snapshot, times = one_node(), sorted(times)
    rows = snapshot.submit([Job(f"job-{number}", "all", 1, float(at)) for number, at in enumerate(times)])
    for number in stops:
        row = rows[number % len(rows)]
        begin(snapshot, row)
        snapshot.stop(row, 0.0)
    assert snapshot.queue.tolist() == rows


def test_the_queue_is_in_the_order_of_submission_in_whatever_order_it_is_told():
    snapshot = one_node()
    snapshot.submit([Job("late", "all", 1, submit_s=9.0), Job("early", "all", 1, submit_s=3.0)])
    snapshot.submit([Job("middle", "all", 1, submit_s=5.0)])
    assert names(snapshot, snapshot.queue) == ["early", "middle", "late"]


def test_time_does_not_go_back():
    snapshot = one_node()
    snapshot.advance(5.0)
    snapshot.advance(5.0)
    with pytest.raises(AssertionError, match="time goes on"):
        snapshot.advance(4.0)


def test_nodes_are_never_given_twice_and_gangs_never_cut():
    snapshot = one_node()
    a, b = snapshot.submit([Job("a", "all", 6), Job("b", "all", 4)])
    place = snapshot.nodes.room(snapshot.nodes.pools[0]).find(6)
    other = snapshot.nodes.room(snapshot.nodes.pools[0]).find(4)
    assert place is not None
    assert other is not None
    with pytest.raises(AssertionError, match="all of a gang or nothing"):
        snapshot.start(b, 0, place)
    snapshot.start(a, 0, place)
    with pytest.raises(AssertionError, match="nodes are never given twice"):
        snapshot.start(b, 0, other)
    assert snapshot.nodes.free.tolist()[:1] == [2]
    assert snapshot.tenants.used[0] == 6


def test_a_job_that_runs_is_not_started_again():
    snapshot = one_node()
    (row,) = snapshot.submit([Job("a", "all", 2)])
    begin(snapshot, row)
    with pytest.raises(AssertionError):
        begin(snapshot, row)


def test_recent_use_of_tenants_grows_as_time_passes():
    snapshot = one_node()
    begin(snapshot, *snapshot.submit([Job("a", "all", 4)]))
    snapshot.advance(100.0)
    assert snapshot.tenants.recent[0] == pytest.approx(400.0, rel=1e-3)


def test_a_job_that_never_saves_has_nothing_saved():
    snapshot = one_node()
    (row,) = snapshot.submit([Job("a", "all", 4, save_every_s=math.inf)])
    begin(snapshot, row)
    snapshot.advance(100.0)
    assert snapshot.saved_s(snapshot.active, 100.0).tolist() == [0.0]


def test_a_job_that_never_saves_is_the_same_in_json():
    snapshot = one_node()
    snapshot.submit([Job("a", "all", 4, save_every_s=math.inf)])
    assert everything(ClusterSnapshot.from_json(snapshot.to_json())) == everything(snapshot)


# -- nodes that fail


def test_a_node_that_fails_takes_its_jobs_with_it_and_a_spare_its_place():
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 4, ["n0", "n1", "n2", "n3"])
    snapshot.nodes.state[3] = SPARE
    snapshot.tenants.join("all", 16)
    wide, small, other = snapshot.submit(
        [Job("wide", "all", 6), Job("small", "all", 1, 1.0), Job("other", "all", 4, 2.0)]
    )
    for row in (wide, small, other):
        begin(snapshot, row)
    snapshot.advance(2000.0)
    assert set(snapshot.fail(1)) == {wide, small}
    assert names(snapshot, snapshot.queue) == ["wide", "small"]
    assert names(snapshot, snapshot.active) == ["other"]
    assert snapshot.nodes.state.tolist()[:4] == [HEALTHY, QUARANTINED, HEALTHY, HEALTHY]
    assert snapshot.nodes.room(snapshot.nodes.pools[0]).free.tolist() == [4, 0, 0, 4]
    assert snapshot.jobs.done_s[wide] == 1800.0
    assert snapshot.tenants.used[0] == 4
    assert everything(ClusterSnapshot.from_json(snapshot.to_json())) == everything(snapshot)
    snapshot.mend(1)
    assert snapshot.nodes.room(snapshot.nodes.pools[0]).free.tolist() == [4, 4, 0, 4]


def test_a_spare_that_fails_is_replaced_by_none():
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 4, ["n0", "n1", "n2"])
    snapshot.nodes.state[1:3] = SPARE
    assert snapshot.fail(1) == []
    assert snapshot.nodes.state.tolist()[:3] == [HEALTHY, QUARANTINED, SPARE]


def test_a_job_that_would_need_a_spare_is_refused():
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 4, ["n0", "n1"], spares=1)
    snapshot.tenants.join("all", 4)
    with pytest.raises(UsageError, match="job j asks for 8 GPUs"):
        snapshot.submit([Job("j", "all", 8)])


# -- refused


@pytest.mark.parametrize(
    ("name", "job", "says", "hint"),
    [
        ("no GPUs", Job("j", "org", 0), "job j asks for 0 GPUs", "whole numbers"),
        ("negative GPUs", Job("j", "org", -4), "job j asks for -4 GPUs", "whole numbers"),
        ("part of a GPU", Job("j", "org", 1.5), "job j asks for 1.5 GPUs", "whole numbers"),  # type: ignore[arg-type]
        ("no number", Job("j", "org", math.nan), "job j asks for nan GPUs", "whole numbers"),
        ("endless", Job("j", "org", math.inf), "job j asks for inf GPUs", "whole numbers"),
        ("of nobody", Job("j", "green", 1), "job j is of green, whom nobody has named", "org, red, blue"),
        ("there already", Job("old", "org", 1), "job old is there already", None),
        ("above all nodes", Job("j", "org", 15), "job j asks for 15 GPUs", "8 at most"),
        ("above every pool", Job("j", "org", 9), "job j asks for 9 GPUs", "8 at most"),
        ("above its borrowing", Job("j", "blue", 7), "job j asks for 7 GPUs, and blue may use 6", "6 at most"),
        ("above every domain", Job("j", "org", 7, within="rack"), "job j asks for 7 GPUs within one rack", "6 at most"),
        ("in a domain that nobody knows", Job("j", "org", 1, within="row"), "job j must lie within a row", "rack"),
        ("limit is no time", Job("j", "org", 1, limit_s=-1.0), "job j", None),
        ("limit is no number", Job("j", "org", 1, limit_s=math.nan), "job j", None),
        ("submitted at no time", Job("j", "org", 1, math.nan), "job j", None),
        ("saves all the time", Job("j", "org", 1, save_every_s=0.0), "job j", None),
        ("restarts back in time", Job("j", "org", 1, restart_s=-1.0), "job j", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_jobs_that_can_never_run_are_refused_with_the_nearest_that_could(name, job, says, hint):
    snapshot = small()
    snapshot.submit([Job("old", "org", 1)])
    before = everything(snapshot)
    with pytest.raises(UsageError) as error:
        snapshot.submit([job])
    assert error.value.message.startswith(says)
    assert "\n" not in error.value.message
    assert hint is None or hint in (error.value.hint or "")
    assert everything(snapshot) == before


@pytest.mark.parametrize("tenant", ["org", "red", "blue"])
def test_the_nearest_that_could_run_is_accepted_and_can(tenant):
    """Of the sizes that are accepted all find a place where nothing else runs; the largest is what the hint says."""
    accepted, hints = [], set()
    for gpus in range(1, 20):
        snapshot = small()
        try:
            (row,) = snapshot.submit([Job("j", tenant, gpus)])
        except UsageError as error:
            hints.add(error.hint)
        else:
            accepted.append(gpus)
            if not begin(snapshot, row):
                pytest.fail(f"{gpus} GPUs were accepted, and never find a place")
    assert accepted == list(range(1, len(accepted) + 1))
    assert all(str(len(accepted)) in hint for hint in hints)


def test_a_job_that_needs_what_others_never_lend_is_refused():
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 8, ["n0"])
    snapshot.tenants.join("a", 4)
    snapshot.tenants.join("b", 4, lend=0)
    with pytest.raises(UsageError, match="job j asks for 8 GPUs"):
        snapshot.submit([Job("j", "a", 8)])


def test_of_several_jobs_all_join_the_queue_or_none():
    snapshot = one_node()
    with pytest.raises(UsageError):
        snapshot.submit([Job("good", "all", 1), Job("bad", "all", 99)])
    assert names(snapshot, snapshot.queue) == list(snapshot.jobs.rows) == []
    snapshot.submit([Job("good", "all", 1)])


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_nodes_have_whole_numbers_of_gpus(size):
    with pytest.raises(UsageError, match=f"{size} GPUs"):
        ClusterSnapshot().nodes.join("h100", size, ["n0"])


def test_of_several_nodes_all_join_or_none():
    snapshot = one_node()
    with pytest.raises(UsageError, match="node n0 is named twice"):
        snapshot.nodes.join("h100", 8, ["n1", "n0"])
    assert len(snapshot.nodes) == 1
    pool = snapshot.nodes.join("h100", 8, ["n1"])
    assert (pool.first, pool.end) == (1, 2)


@pytest.mark.parametrize("domains", [{"rack": ["r0"]}, {"block": ["b0", "b0"]}])
def test_domains_that_do_not_fit_are_refused_in_one_sentence(domains):
    snapshot = small()
    before = everything(snapshot)
    with pytest.raises(UsageError):
        snapshot.nodes.join("b200", 8, ["b0", "b1"], domains)
    assert everything(snapshot) == before


# -- JSON


def written() -> dict[str, Any]:
    snapshot = small()
    rows = snapshot.submit([Job("a", "red", 3), Job("b", "blue", 6), Job("c", "org", 1)])
    for row in rows[:2]:
        begin(snapshot, row)
    found: dict[str, Any] = json.loads(snapshot.to_json())
    return found


def test_json_is_strict():
    """Other readers take neither NaN nor Infinity, and a job without a limit, started or not, holds both."""
    snapshot = one_node()
    rows = snapshot.submit([Job("a", "all", 8), Job("b", "all", 1)])
    assert begin(snapshot, rows[0])
    assert np.isinf(snapshot.jobs.limit_s[rows]).all()
    constants: list[str] = []
    found = json.loads(snapshot.to_json(), parse_constant=constants.append)
    assert constants == []
    assert [job["limit_s"] for job in found["jobs"]] == ["inf", "inf"]


def test_a_snapshot_read_back_goes_on():
    read = ClusterSnapshot.from_json(json.dumps(written()))
    read.end(read.jobs.rows["a"])
    read.stop(read.jobs.rows["b"], 0.0)
    read.submit([Job("d", "org", 1, submit_s=1.0)])
    assert names(read, read.queue)[-1] == "d"
    assert set(names(read, read.queue)) == {"b", "c", "d"}
    assert (read.nodes.free == read.nodes.gpus).all()
    assert not read.tenants.used.any()


def gone(key: str) -> Any:
    return lambda found: found.pop(key)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("another format", lambda found: found.update(format=2)),
        ("no format", gone("format")),
        ("a tenant twice", lambda found: found["tenants"].append(found["tenants"][0])),
        ("tenants in a circle", lambda found: found["tenants"][0].update(parent="red")),
        ("a node twice", lambda found: found["pools"].append(found["pools"][0])),
        ("a negative guarantee", lambda found: found["tenants"][0].update(guarantee=-1)),
        ("no tenants", gone("tenants")),
        ("a job twice", lambda found: found["jobs"].append(found["jobs"][0])),
        ("a job of nobody", lambda found: found["jobs"][0].update(tenant="green")),
        ("a state that nobody knows", lambda found: found["pools"][0].update(state=["good", "bad"])),
        (
            "a job on GPUs of another",
            lambda found: found["jobs"][1].update(place=found["jobs"][2]["place"]),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_snapshot_is_refused_in_one_sentence(name, change):
    found = written()
    change(found)
    with pytest.raises(UsageError) as error:
        ClusterSnapshot.from_json(json.dumps(found))
    assert "\n" not in error.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"format"'])
def test_what_is_not_even_json_is_refused_too(text):
    with pytest.raises(UsageError):
        ClusterSnapshot.from_json(text)


def test_what_happens_to_a_copy_does_not_happen_here() -> None:
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 4, ["a", "b"])
    snapshot.tenants.join("red", 8)
    one, two = snapshot.submit([Job("one", "red", 4, user="ann"), Job("two", "red", 4)])
    snapshot.start(one, 0, Placement(np.array([0], np.int32), np.array([4], np.int32)))
    before = snapshot.to_json()
    other = snapshot.copy()
    assert other.to_json() == before
    other.advance(5000.0)
    other.start(two, 0, Placement(np.array([1], np.int32), np.array([4], np.int32)))
    other.end(one)
    other.submit([Job("three", "red", 1)])
    other.fail(1)
    assert other.to_json() != before
    assert snapshot.to_json() == before
