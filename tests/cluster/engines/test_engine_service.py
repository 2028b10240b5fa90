"""The service of `headway up` as an engine, on this machine's node: all of the shared suite (slow: `make test-all`)."""

from collections.abc import Iterator

import pytest

pytest.importorskip("sqlalchemy")

from engine_suite import *  # noqa: F403
from engine_suite import EngineHarness

from headway.cluster.service.service_engine import ServiceEngine
from service_process import ServiceProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    folder = tmp_path_factory.mktemp("service")
    service = ServiceProcess(folder / "runs", "--cpus", "4", "--gpus", "4")
    service.start()
    yield EngineHarness(lambda: ServiceEngine(folder / "runs"), folder, machines=1, cpus=4, gpus=4)
    service.stop()
