"""The service on a real PostgreSQL server, if one is installed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("psycopg")

from test_service_simulation import check_record, lived

from headway.cluster.service.plane import ControlPlane
from headway.cluster.service.store import ServiceStore, Superseded
from headway.cluster.service.tables import open_database
from headway.errors import EngineError

pytestmark = pytest.mark.slow
PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of a server of our own, which listens on a socket in its folder only."""
    if not PROGRAMS or os.getuid() != 0 or shutil.which("runuser") is None:
        pytest.skip("needs PostgreSQL, and root to run it as postgres")
    folder = Path(tempfile.mkdtemp(prefix="headway-pg-"))
    shutil.chown(folder, "postgres")
    as_postgres = ["runuser", "-u", "postgres", "--"]

    def run(program: str, *words: str) -> None:
        subprocess.run(
            [*as_postgres, PROGRAMS[-1] / program, *words], check=True, cwd=folder, stdout=subprocess.DEVNULL
        )

    run("initdb", "-D", f"{folder}/data", "-A", "trust", "-N")
    options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    run("pg_ctl", "-D", f"{folder}/data", "-w", "-l", f"{folder}/log", "-o", options, "start")
    try:
        yield f"postgresql://postgres@/postgres?host={folder}"
    finally:
        run("pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop")
        shutil.rmtree(folder)


def test_simulated_world_holds_on_postgres(server: str, tmp_path: Path) -> None:
    check_record(lived(tmp_path, 1, 100, server))


def test_services_fence_each_other_and_an_absent_server_is_one_sentence(server: str) -> None:
    older = ServiceStore(open_database(server))
    plane = ControlPlane(older)
    newer = ServiceStore(open_database(server))
    with pytest.raises(Superseded):
        plane.set_cluster([], [{"name": "default"}], "headway")
    older.close()
    newer.close()
    with pytest.raises(EngineError, match="the database failed"):
        open_database("postgresql://postgres@/postgres?host=/nowhere")
