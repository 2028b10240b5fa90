"""Writes that share a transaction: each with its own outcome and its own entry in the audit log."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from sqlalchemy import insert, select

from eventually import eventually
from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.service.audit import Action, acting, describe
from headway.cluster.service.faults import WritePoints
from headway.cluster.service.group_commit import MOST_TOGETHER, GroupCommit
from headway.cluster.service.new_jobs import NewJob
from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import JOB_IS_NEW, audit, facts, jobs, open_database, record, sqlite_url
from headway.errors import UsageError

NODES = [{"name": "n1", "chip": "fake", "gpus": ["a", "b"], "cpus": 8, "memory_bytes": 2**34}]


class PausingPoints(WritePoints):
    """Holds up the first commit until it may happen, and can fail one."""

    def __init__(self) -> None:
        super().__init__()
        self.may_commit, self.commits, self.failing = threading.Event(), 0, False

    def reach(self, place: str) -> None:
        super().reach(place)
        if place == "before commit":
            self.commits += 1
            self.may_commit.wait()
            if self.failing:
                raise RuntimeError("killed")


@pytest.fixture
def points() -> PausingPoints:
    points = PausingPoints()
    points.may_commit.set()
    return points


@pytest.fixture
def store(tmp_path: Path, points: PausingPoints) -> Iterator[ServiceStore]:
    store = ServiceStore(open_database(sqlite_url(tmp_path / "control.db")), points)
    yield store
    store.close()


def together(group: GroupCommit, points: PausingPoints, acts: list[object]) -> list[object]:
    """Run writes in threads of their own, so that all but the first come while its commit is held up."""
    points.may_commit.clear()
    outcomes: list[object] = [None] * len(acts)

    def run(number: int) -> None:
        try:
            with acting(Action(f"user-{number}", "token", None, "POST /x", "/x", 0.0)):
                outcomes[number] = group.run(acts[number])  # type: ignore[arg-type]
        except (UsageError, RuntimeError) as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    threads[0].start()
    eventually(lambda: points.commits > 0)
    for thread in threads[1:]:
        thread.start()
    eventually(lambda: len(group._waiting) == len(acts) - 1)
    points.may_commit.set()
    for thread in threads:
        thread.join()
    return outcomes


def note(name: str) -> object:
    """A write that leaves a row, a line of the record and a node to wake."""

    def act(transaction: Transaction) -> str:
        transaction.execute(insert(facts).values(name=name, value=name))
        transaction.add_lines([{"at": 0.0, "exited": name}])
        describe(name)
        if name.startswith("bad"):
            raise UsageError(f"{name} cannot be")
        return name

    return act


def test_writes_that_wait_are_committed_at_once_and_fail_by_themselves(
    store: ServiceStore, points: PausingPoints
) -> None:
    names = ["first", "a", "bad-1", "b", "bad-2", "c"]
    points.commits = 0
    outcomes = together(GroupCommit(store), points, [note(name) for name in names])
    assert [str(outcome) for outcome in outcomes] == ["first", "a", "bad-1 cannot be", "b", "bad-2 cannot be", "c"]
    assert points.commits == 2  # the first one's, and that of all others
    good = {"first", "a", "b", "c"}
    with store.read() as connection:
        assert good == set(connection.execute(select(facts.c.name)).scalars()) - {"format", "cluster", "epoch"}
        rows = connection.execute(select(record.c.seq, record.c.line).order_by(record.c.seq)).all()
        entries = {row.detail: row.user for row in connection.execute(select(audit))}
    assert [seq for seq, _ in rows] == [1, 2, 3, 4]  # without gaps
    assert {line["exited"] for line in store.lines} == good
    assert entries == {name: f"user-{names.index(name)}" for name in good}
    again = ServiceStore(store._engine)  # which checks the chain of checksums
    assert list(again.lines) == list(store.lines)


def test_failed_commit_fails_every_write_of_it_and_no_other(store: ServiceStore, points: PausingPoints) -> None:
    group = GroupCommit(store)
    points.failing = True
    outcomes = together(group, points, [note(name) for name in ("first", "a", "b")])
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)
    points.failing = False
    assert group.run(note("later")) == "later"  # type: ignore[arg-type]
    assert [line["exited"] for line in store.lines] == ["later"]


def test_more_writes_than_one_transaction_takes_are_all_done(store: ServiceStore, points: PausingPoints) -> None:
    names = [f"w{number}" for number in range(2 * MOST_TOGETHER + 3)]
    assert together(GroupCommit(store), points, [note(name) for name in names]) == names
    assert {line["exited"] for line in store.lines} == set(names)


def test_jobs_that_depend_on_nothing_are_known_to_the_scheduler_when_they_are_accepted(store: ServiceStore) -> None:
    plane = ControlPlane(store)
    plane.set_cluster(NODES, [{"name": "red"}], "headway")
    request = LaunchRequest("job", ("true",), Path("/"), gpus=1)
    first, limited = plane.submit_all(
        [NewJob(request), NewJob(LaunchRequest("array", ("true",), Path("/"), gpus=1, array=3, at_once=1))]
    )
    dependent = plane.submit(LaunchRequest("next", ("true",), Path("/"), gpus=1, site={"after": first}))
    assert [line["job"]["name"] for line in store.lines if "job" in line] == [first]
    with store.read() as connection:
        new = connection.execute(select(jobs.c.id).where(JOB_IS_NEW).order_by(jobs.c.number)).scalars().all()
    assert new == [*(f"{limited}_{task}" for task in range(3)), dependent]
    plane.take_events()
    assert [line["job"]["name"] for line in store.lines if "job" in line] == [first, f"{limited}_0"]


def test_queries_of_a_cycle_read_only_the_rows_that_they_are_about(tmp_path: Path) -> None:
    """By the plans that SQLite makes, without statistics, as in every new database."""
    from headway.cluster.service import tables as t

    engine = open_database(sqlite_url(tmp_path / "plans.db"))
    newest = t.jobs.c.number.desc()
    queries = {
        "jobs_new": select(t.jobs.c.id).where(t.JOB_IS_NEW).order_by(t.jobs.c.number),
        "jobs_offered": select(t.jobs.c.id).where(t.JOB_IS_OFFERED & ~t.jobs.c.held).limit(1),
        "jobs_alive": select(t.jobs).where(t.JOB_IS_ALIVE, t.jobs.c.tenant.in_(["a"])).order_by(t.jobs.c.number),
        "jobs_over": select(t.jobs).where(t.JOB_IS_OVER).order_by(newest).limit(1000),
        "ranks_granted": select(t.ranks).where(t.RANK_IS_GRANTED),
        "ranks_alive": select(t.ranks.c.gpus, t.jobs.c.request)
        .join(t.jobs, t.jobs.c.id == t.ranks.c.job)
        .where(t.RANK_IS_ALIVE),
        "jobs_by_name": select(t.jobs.c.id).where(t.jobs.c.name == "x").order_by(newest).limit(1),
    }
    with engine.connect().execution_options(reads=True) as connection:
        for index, query in queries.items():
            text = str(query.compile(engine, compile_kwargs={"literal_binds": True}))
            plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]
            assert any(f"INDEX {index}" in step for step in plan), (index, plan)
    engine.dispose()
