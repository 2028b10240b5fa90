"""The service of `headway up` as an engine, on this machine's node."""

from collections.abc import Iterator

import pytest

pytest.importorskip("sqlalchemy")

from engine_suite import *  # noqa: E402, F403
from engine_suite import EngineHarness  # noqa: E402
from service_process import ServiceProcess  # noqa: E402

from headway.cluster.service.service_engine import ServiceEngine  # noqa: E402


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    folder = tmp_path_factory.mktemp("service")
    service = ServiceProcess(folder / "runs", "--cpus", "4", "--gpus", "4")
    service.start()
    yield EngineHarness(lambda: ServiceEngine(folder / "runs"), folder, machines=1, cpus=4, gpus=4)
    service.stop()
