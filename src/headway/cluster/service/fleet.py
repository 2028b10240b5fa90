"""The nodes of a running cluster: which get new jobs, which are to be empty, and which are given up.

A node is cordoned by an operator (no new jobs), drained (its jobs save, stop and wait again, too), or has maintenance
at a time, which the scheduler plans around. One that is silent for AWAY_S gets no new jobs. After `give_up_after_s` its
jobs are given up: they wait again, for other nodes. It may come back with them still running. Then it is fenced: its
orders are to kill these, and nothing new starts there until its report says that they are gone.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, select, update

from headway.cluster.service.node_state import NodeSilence
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import (
    RANK_IS_ALIVE,
    few_at_a_time,
    jobs,
    maintenance,
    node_conditions,
    nodes,
    ranks,
)
from headway.errors import UsageError

AWAY_S = 30.0
"""A node that has not reported for so long gets no new jobs."""
GIVE_UP_AFTER_S = 600.0
"""A node that has not reported for so long loses its jobs."""
LOOK_EVERY_S = 1.0
"""Between looks at all nodes."""
LONGEST_WINDOW_S = 366 * 86400.0
SHIFT_S = 30.0
"""How far the scheduler's time of a maintenance may be off: it stands still while no service runs."""


class JobControl(Protocol):
    """What happens to jobs because of their nodes."""

    @property
    def now_s(self) -> float:
        """The scheduler's time."""
        ...

    @property
    def wall_s(self) -> float:
        """Unix seconds."""
        ...

    def nodes_changed(self, names: Iterable[str] | None = None) -> None:
        """Have nodes and the scheduler look again."""
        ...

    def stop_job(self, transaction: Transaction, row: Row[Any], why: str) -> None:
        """Have a job that starts or runs stop."""
        ...

    def finish_job(self, transaction: Transaction, name: str) -> None:
        """Record what becomes of a job if all of its commands have exited."""
        ...


class Fleet:
    """What operators, silence and time do to nodes."""

    def __init__(
        self,
        store: ServiceStore,
        control: JobControl,
        *,
        speed: float = 1.0,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._control, self._speed = store, control, speed
        self.give_up_after_s = give_up_after_s
        self._monotonic, self._look_at = monotonic, monotonic()
        self.silence = NodeSilence(monotonic)

    # -- by operators

    def cordon(self, name: str, cordoned: bool = True) -> bool:
        """Give a node no new jobs, or give it some again; False if it is so already."""
        with self._store.write() as transaction:
            self._check_name(transaction, name)
            if is_cordoned(transaction, name) == cordoned:
                return False
            where = node_conditions.c.name == name
            transaction.execute(update(node_conditions).where(where).values(cordoned=cordoned))
            if cordoned:  # a node that is not cordoned any more is healthy once it has reported
                self.set_state(transaction, name, "draining")
        self._control.nodes_changed()
        return True

    def drain(self, name: str) -> list[str]:
        """Cordon a node, have its jobs save and stop, and return them: they wait again, for other nodes."""
        self.cordon(name)
        with self._store.write() as transaction:
            rows = _jobs_on(transaction, name)
            for row in rows:
                if row.state in ("starting", "running"):
                    self._control.stop_job(transaction, row, "drain")
        self._control.nodes_changed()
        return [row.id for row in rows]

    def schedule_maintenance(self, name: str, begins: float, ends: float) -> None:
        """Have a node empty from one time to another, in Unix seconds."""
        now = self._control.wall_s
        if not now < ends or not begins < ends <= begins + LONGEST_WINDOW_S:
            raise UsageError(
                f"maintenance of {name} would be from {begins:.0f} to {ends:.0f}, and now is {now:.0f}",
                hint="Unix seconds; it ends after it begins, within a year, and not before now",
            )
        with self._store.write() as transaction:
            self._check_name(transaction, name)
            self._remove_window(transaction, name)
            transaction.execute(insert(maintenance).values(node=name, begins=begins, ends=ends))
            self._record_windows(transaction)
        self._control.nodes_changed()

    def cancel_maintenance(self, name: str) -> bool:
        """Forget the maintenance of a node; False if there is none."""
        with self._store.write() as transaction:
            self._check_name(transaction, name)
            done = self._remove_window(transaction, name)
        self._control.nodes_changed()
        return done

    # -- by silence and time

    def look(self) -> None:
        """Note which nodes are silent, give up those that are for too long, and keep maintenance at its time: once in
        LOOK_EVERY_S, however many cycles there are."""
        if self._monotonic() < self._look_at:
            return
        self._look_at = self._monotonic() + LOOK_EVERY_S
        self.silence.look()
        with self._store.read() as connection:
            rows = connection.execute(select(nodes.c.name, nodes.c.state)).all()
            away = self.silence.silent_for(AWAY_S, (row.name for row in rows))
            new = [row.name for row in rows if row.name in away and row.state in ("healthy", "quarantined")]
            silent = self.silence.silent_for(self.give_up_after_s, away)
            gone = sorted(silent & _busy_nodes(connection)) if silent else []
            moved = self._moved_windows(connection)
        if not new and not gone and not moved:
            return
        with self._store.write() as transaction:
            # some may have reported meanwhile
            self.set_states(transaction, sorted(self.silence.silent_for(AWAY_S, new)), "draining")
            for name in sorted(self.silence.silent_for(self.give_up_after_s, gone)):
                self._give_up(transaction, name)
            self._record_windows(transaction)
        self._control.nodes_changed({*new, *gone, *transaction.nodes})

    def _give_up(self, transaction: Transaction, name: str) -> None:
        rows = _jobs_on(transaction, name)
        result = json.dumps(asdict(RankResult(given_up=True)))
        transaction.execute(update(ranks).where(on_node(name)).values(state="exited", result=result))
        for row in rows:
            if row.state in ("starting", "running"):
                self._control.stop_job(transaction, row, "given up")
            else:
                self._control.finish_job(transaction, row.id)

    def set_state(self, transaction: Transaction, name: str, state: str) -> None:
        """Record the state of a node, if it changes."""
        self.set_states(transaction, [name], state)

    def set_states(self, transaction: Transaction, names: Sequence[str], state: str) -> None:
        """Record the state of nodes, of those for which it changes."""
        at = self._control.now_s
        for some in few_at_a_time(names):
            changing = nodes.c.name.in_(some) & (nodes.c.state != state)
            changed = transaction.execute(select(nodes.c.name).where(changing)).scalars().all()
            if changed:
                transaction.execute(update(nodes).where(changing).values(state=state))
                transaction.add_lines([{"at": at, "node": name, "state": state} for name in changed])

    @staticmethod
    def set_problems(transaction: Transaction, name: str, problems: str) -> None:
        """Record what a node says is wrong with it, as JSON."""
        where = node_conditions.c.name == name
        if not transaction.execute(update(node_conditions).where(where).values(problems=problems)).rowcount:
            transaction.execute(insert(node_conditions).values(name=name, problems=problems))

    @staticmethod
    def _check_name(transaction: Transaction, name: str) -> None:
        known = set(transaction.execute(select(nodes.c.name)).scalars())
        if name not in known:
            raise UsageError(f"unknown node '{name}'", hint="headway nodes --engine service lists them")
        if transaction.execute(select(node_conditions.c.name).where(node_conditions.c.name == name)).first() is None:
            transaction.execute(insert(node_conditions).values(name=name))

    # -- maintenance: at Unix times, told the scheduler in its own

    def leaves_soon(self, lead_s: float) -> bool:
        """Whether a node with jobs is about to have maintenance, so that the scheduler must look at it."""
        due = maintenance.c.away_s.is_not(None) & (maintenance.c.away_s - lead_s <= self._control.now_s)
        busy = ranks.c.node.in_(select(maintenance.c.node).where(due)) & (ranks.c.state == "running")
        with self._store.read() as connection:
            return connection.execute(select(ranks.c.job).where(busy).limit(1)).first() is not None

    def _moved_windows(self, connection: Connection) -> list[tuple[str, float | None, float | None]]:
        """Windows of which the scheduler must be told something new: node, start and end in its time, or nothing once
        they are over."""
        now_s, wall = self._control.now_s, self._control.wall_s
        moved = list[tuple[str, float | None, float | None]]()
        for row in connection.execute(select(maintenance)).all():
            away_s, back_s = (now_s + (at - wall) * self._speed for at in (row.begins, row.ends))
            if row.ends <= wall:
                moved.append((row.node, None, None))
            elif row.away_s is None or abs(row.back_s - back_s) > SHIFT_S * self._speed:
                moved.append((row.node, away_s, back_s))
        return moved

    def _record_windows(self, transaction: Transaction) -> None:
        for name, away_s, back_s in self._moved_windows(transaction):  # type: ignore[arg-type]
            where = maintenance.c.node == name
            if away_s is None:
                self._remove_window(transaction, name)
                continue
            transaction.execute(update(maintenance).where(where).values(away_s=away_s, back_s=back_s))
            line = {"at": self._control.now_s, "maintenance": name, "away_s": away_s, "back_s": back_s}
            transaction.add_lines([line])

    def _remove_window(self, transaction: Transaction, name: str) -> bool:
        where = maintenance.c.node == name
        known = transaction.execute(select(maintenance.c.away_s).where(where)).first()
        if known is None:
            return False
        transaction.execute(delete(maintenance).where(where))
        if known.away_s is not None:
            line = {"at": self._control.now_s, "maintenance": name, "away_s": None, "back_s": None}
            transaction.add_lines([line])
        return True


def is_elsewhere(transaction: Transaction, name: str) -> bool:
    """Whether a node has joined with a certificate."""
    where = node_conditions.c.name == name
    return transaction.execute(select(node_conditions.c.fingerprint).where(where)).scalar() is not None


def is_cordoned(transaction: Transaction, name: str) -> bool:
    """Whether an operator has cordoned a node."""
    where = node_conditions.c.name == name
    return bool(transaction.execute(select(node_conditions.c.cordoned).where(where)).scalar())


def on_node(name: str) -> ColumnElement[bool]:
    """Condition for ranks: what is on a node."""
    return (ranks.c.node == name) & RANK_IS_ALIVE


def _busy_nodes(connection: Connection) -> set[str]:
    """The nodes that have something to run."""
    return set(connection.execute(select(ranks.c.node).where(RANK_IS_ALIVE).distinct()).scalars())


def _jobs_on(connection: Connection | Transaction, name: str) -> Sequence[Row[Any]]:
    """The jobs that have something on a node."""
    wanted = select(jobs).where(jobs.c.id.in_(select(ranks.c.job).where(on_node(name)))).order_by(jobs.c.number)
    return connection.execute(wanted).all()
