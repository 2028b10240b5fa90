"""The tables of the service, and how its database is opened: SQLite by default, PostgreSQL by URL."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    literal_column,
    make_url,
)
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from headway.cluster.engines.engine import OVER
from headway.errors import EngineError, UsageError

FORMAT = 1
MOST_VALUES = 500
"""Of one IN: databases limit the variables of a statement."""
metadata = MetaData()

facts = Table("facts", metadata, Column("name", String(40), primary_key=True), Column("value", Text, nullable=False))
"""Format, epoch of the newest service, and the cluster's id."""

nodes = Table(
    "nodes",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("spec", Text, nullable=False),  # JSON: chip, GPU ids, CPUs, memory
    Column("state", String(20), nullable=False),  # as the record has it
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("number", Integer, nullable=False, unique=True),  # in order of submission
    Column("name", String(128), nullable=False),
    Column("tenant", String(128), nullable=False),
    Column("request", Text, nullable=False),  # LaunchRequest as JSON
    Column("demand", Text, nullable=False),  # what the scheduler is told, as JSON
    Column("state", String(20), nullable=False),
    Column("reason", Text, nullable=False, default=""),
    Column("stop", String(20), nullable=False, default=""),  # why it was told to stop: cancel, preempt, broken
    Column("held", Boolean, nullable=False, default=False),
    Column("offered", Boolean, nullable=False, default=False),  # whether the scheduler knows it
    Column("starts", Integer, nullable=False, default=0),
    Column("exit_status", Integer),
    Column("submitted", Float, nullable=False),  # Unix seconds, as the other times of this table
    Column("started", Float),
    Column("ended", Float),
    Column("array", String(40)),  # id that the tasks of an array share
    Column("at_once", Integer),
    Column("key", String(400), unique=True),  # of the submission: repeating it has no effect
    Index("jobs_by_array", "array"),
    Index("jobs_by_name", "name"),
)
# Conditions are literal, not parameters, so that databases see that an index holds all rows that match. There is no
# index of all states: SQLite would take it instead, and read fifty thousand waiting jobs to find the new ones.
_OVER: list[Any] = [literal_column(f"'{state}'") for state in sorted(OVER)]
JOB_IS_OVER, JOB_IS_ALIVE = jobs.c.state.in_(_OVER), jobs.c.state.not_in(_OVER)
JOB_WAITS = jobs.c.state == literal_column("'waiting'")
JOB_IS_NEW, JOB_IS_OFFERED = JOB_WAITS & ~jobs.c.offered, JOB_WAITS & jobs.c.offered
"""Whether the scheduler knows a waiting job."""

ranks = Table(
    "ranks",
    metadata,
    Column("job", String(40), primary_key=True),
    Column("start", Integer, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("node", String(128), nullable=False),
    Column("gpus", Text, nullable=False),  # ids, as JSON
    Column("machines", Text, nullable=False),  # nodes of all ranks, as JSON
    Column("state", String(20), nullable=False),  # granted, issued, running, exited
    Column("after", Text, nullable=False),  # JSON: starts of other jobs that must have exited first
    Column("result", Text),  # JSON: how it exited
    Column("signals", Text, nullable=False, default="[]"),  # JSON: numbers of the signals to send, in order
    Index("ranks_by_node", "node", "state"),
)
"""One row per node of a job's newest start: what the node is to run."""
RANK_IS_ALIVE = ranks.c.state != literal_column("'exited'")
RANK_IS_GRANTED = ranks.c.state == literal_column("'granted'")


def _partial_index(name: str, column: Column[Any], condition: Any) -> None:
    """Have a database find the rows of a condition, however many others there are."""
    Index(name, column, sqlite_where=condition, postgresql_where=condition)


_partial_index("jobs_over", jobs.c.number, JOB_IS_OVER)
_partial_index("jobs_alive", jobs.c.number, JOB_IS_ALIVE)
_partial_index("jobs_offered", jobs.c.number, JOB_IS_OFFERED)
_partial_index("jobs_new", jobs.c.number, JOB_IS_NEW)
_partial_index("ranks_alive", ranks.c.node, RANK_IS_ALIVE)
_partial_index("ranks_granted", ranks.c.job, RANK_IS_GRANTED)

dependencies = Table(
    "dependencies",
    metadata,
    Column("job", String(40), primary_key=True),
    Column("needs", String(40), primary_key=True),  # a job, or an array
    Column("condition", String(10), primary_key=True),  # ok, any: how it must have ended
)
"""What must be over before the scheduler is told of a job."""

node_conditions = Table(
    "node_conditions",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("cordoned", Boolean, nullable=False, default=False),
    Column("problems", Text, nullable=False, default="[]"),  # JSON: sentences of its last report
    Column("version", String(40), nullable=False, default=""),  # of Headway there
    Column("fingerprint", String(64), unique=True),  # of its certificate; none if it is this machine's
)
"""What else is known of a node; one without a row has no conditions."""

maintenance = Table(
    "maintenance",
    metadata,
    Column("node", String(128), primary_key=True),
    Column("begins", Float, nullable=False),  # Unix seconds
    Column("ends", Float, nullable=False),
    Column("away_s", Float),  # both in the scheduler's time, as the record has them; none if it has not yet
    Column("back_s", Float),
)

renewed_certificates = Table(
    "renewed_certificates",
    metadata,
    Column("fingerprint", String(64), primary_key=True),
    Column("first", String(64), nullable=False),  # the one that its node joined with
    Column("ends", Float, nullable=False),  # Unix seconds
)
"""Certificates that nodes were given since they joined."""

join_tokens = Table(
    "join_tokens",
    metadata,
    Column("digest", String(64), primary_key=True),  # SHA-256
    Column("expires", Float, nullable=False),  # Unix seconds
    Column("replaces", String(128)),  # a node whose certificate it may replace
    Column("used_by", String(64)),  # hash of the public key that used it
)
"""Each admits one node."""

record = Table(
    "record",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("line", Text, nullable=False),
    Column("sum", String(16), nullable=False),  # of the sum before it and the line
)


users = Table(
    "users",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("role", String(20), nullable=False),
    Column("tenant", String(128)),  # none: all tenants, for admins
    Column("created", Float, nullable=False),  # Unix seconds, as all times of these tables
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("user", String(64), nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
    Column("label", String(100), nullable=False, default=""),
    Column("scopes", Text, nullable=False),  # JSON
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Float),
)

tenant_secrets = Table(
    "tenant_secrets",
    metadata,
    Column("tenant", String(128), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("sealed", Text, nullable=False),  # encrypted value
    Column("changed", Float, nullable=False),
    Column("user", String(64), nullable=False),  # who set it last
)

job_secrets = Table(
    "job_secrets",
    metadata,
    Column("job", String(40), primary_key=True),
    Column("sealed", Text, nullable=False),  # encrypted JSON: values that came with the submission
)

audit = Table(
    "audit",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("user", String(64), nullable=False),
    Column("token", String(16), nullable=False),
    Column("tenant", String(128)),  # of the user
    Column("action", String(100), nullable=False),  # method and route
    Column("target", String(400), nullable=False),  # path of the request
    Column("detail", Text, nullable=False, default=""),
    Column("outcome", String(20), nullable=False),  # done, refused
)
"""Every change that a user made, written in the transaction of the change, and every request that was refused."""


allocations = Table(
    "allocations",
    metadata,
    Column("job", String(40), primary_key=True),
    Column("start", Integer, primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("chip", String(80), nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("cpus", Float, nullable=False),
    Column("began", Float, nullable=False),  # Unix seconds
    Column("ended", Float),
    Index("allocations_by_time", "ended", "began"),
)
"""What every start of a job has held: for usage."""

former_ranks = Table(
    "former_ranks",
    metadata,
    Column("job", String(40), primary_key=True),
    Column("start", Integer, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("node", String(128), nullable=False),
)
"""Where the earlier starts of a job ran: their logs are there."""

folds = Table(
    "folds",
    metadata,
    Column("seq", Integer, primary_key=True),  # lines of the record that it stands for
    Column("at", Float, nullable=False),  # of the last of them
    Column("sum", String(16), nullable=False),  # of the last of them
    Column("cluster", Text, nullable=False),  # JSON: nodes, tenants and policy
    Column("state", LargeBinary, nullable=False),  # the scheduler's state as JSON, compressed
    Column("digest", String(16), nullable=False),  # of the state
)
"""What the first lines of the record lead to."""


def few_at_a_time(values: Iterable[str]) -> Iterator[list[str]]:
    """Split values, in their order, so that each part fits into an IN."""
    every = list(values)
    for first in range(0, len(every), MOST_VALUES):
        yield every[first : first + MOST_VALUES]


def open_database(url: str) -> Engine:
    """Open a database, and create what is missing in it."""
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            engine = _open_sqlite(url)
        elif parsed.get_backend_name() != "postgresql":
            raise ArgumentError
        else:
            engine = create_engine(
                parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True, hide_parameters=True
            )
        metadata.create_all(engine)
        for table in metadata.tables.values():
            for index in table.indexes:  # those of tables that were there already
                index.create(engine, checkfirst=True)
    except ModuleNotFoundError as error:
        raise UsageError(f"{url.split('@')[-1]} needs {error.name}", hint="pip install 'headway[postgres]'") from None
    except ArgumentError:
        raise UsageError("not the URL of a database", hint="postgresql://USER@HOST/NAME or sqlite:///FILE") from None
    except SQLAlchemyError as error:
        raise database_error(error) from None
    return engine


def database_error(error: SQLAlchemyError) -> EngineError:
    """The error for a database that does not answer or does not accept writes."""
    cause = str(getattr(error, "orig", None) or error).strip().split("\n")[0]
    return EngineError(f"the database failed: {cause}", hint="nothing was changed; repeat it once the database is back")


def sqlite_url(file: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{file}"


def _open_sqlite(url: str) -> Engine:
    arguments = {"timeout": 30, "check_same_thread": False}
    # parameters of a failed statement may be secrets: they stay out of errors
    engine = create_engine(url, poolclass=QueuePool, connect_args=arguments, hide_parameters=True)
    prepare: Callable[..., Any] = event.listens_for(engine, "connect")

    @prepare
    def configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # SQLAlchemy begins transactions, below
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        immediate = not connection.get_execution_options().get("reads")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine
