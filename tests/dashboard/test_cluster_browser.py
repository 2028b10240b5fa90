"""The cluster pages in a real Chromium, on `headway up --demo`: no error, nothing that axe calls serious.

Needs what test_browser.py needs.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from test_browser import MISSING, dashboard, visit

from eventually import eventually
from headway.cluster.service.connection import TOKEN, connect, service_folder
from service_process import ServiceProcess, headway, headway_json

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """The demo, and two jobs that want all of its GPUs: the second has to wait for the first."""
    service = ServiceProcess(tmp_path_factory.mktemp("cluster") / "runs", "--demo")
    service.start()
    for name, priority in (("large", "-1"), ("waits", "-2")):
        options = ["--tenant", "nlp", "--machines", "3", "--gpus", "4", "--name", name, "--priority", priority]
        headway(service.runs, "submit", *options, "--", "sleep", "10000")
    eventually(lambda: {"running", "waiting"} <= {job["state"] for job in jobs(service)})
    yield service
    for job in jobs(service):
        headway(service.runs, "cancel", job["id"])
    eventually(lambda: jobs(service) == [])
    service.stop()


def jobs(service: ServiceProcess) -> list[dict[str, Any]]:
    rows = headway_json(service.runs, "queue")
    assert isinstance(rows, list)
    return rows


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_cluster_pages_are_clean(demo: ServiceProcess, look: str) -> None:
    waits = next(job["id"] for job in jobs(demo) if job["name"] == "waits")
    over = headway_json(demo.runs, "queue", "--over")
    assert isinstance(over, list)
    pages = {
        "now": {"path": "/cluster", "expect": [".pool .gpu", ".queue tbody tr", ".tenants tbody tr", ".decisions li"]},
        "why": {"path": f"/cluster?why={waits}", "expect": [".why p"]},
        "over": {"path": "/cluster?over=true", "expect": [".pool"]},
        "timeline": {"path": "/cluster/timeline", "expect": [".lanes .span", ".held-gpus polygon", ".decisions li"]},
        "hour": {"path": "/cluster/timeline?window=3600&kind=start", "expect": [".decisions li"]},
        "job": {"path": f"/cluster/job/{waits}", "expect": [".why p", ".lanes .span"]},
        "unknown": {"path": "/cluster/job/nobody", "expect": [".nothing"]},
    }
    size = {"width": 390, "height": 844} if look == "phone" else {}
    scheme = "dark" if look == "dark" else "light"
    with dashboard(demo.runs.parent) as address:
        seen = visit(address, *({"name": name, "scheme": scheme, **size, **page} for name, page in pages.items()))
    assert [page["name"] for page in seen] == list(pages)
    assert {page["name"]: page["problems"] for page in seen if page["problems"]} == {}
    assert {page["name"]: page["serious"] for page in seen if page["serious"]} == {}
    assert {page["name"]: page["wide"] for page in seen if page["wide"] > 0} == {}, "wider than the window"
    assert "no job 'nobody'" in seen[-1]["text"]


def test_service_by_url_is_shown_and_its_token_stays_here(demo: ServiceProcess, tmp_path: Path) -> None:
    """The same pages from another folder of runs; a job that is submitted while the page is open appears."""
    token = service_folder(demo.runs) / TOKEN
    (tmp_path / "runs").mkdir()
    options = ["--service", connect(demo.runs).url, "--token-file", str(token)]
    program = (
        "import sys,time; from service_process import headway; from pathlib import Path; headway(Path(sys.argv[1]), "
    )
    program += "'submit', '--tenant', 'nlp', '--gpus', '4', '--machines', '3', '--name', 'appears', '--', 'sleep', '9')"
    with dashboard(tmp_path, *options) as address:
        path = os.pathsep.join(sys.path)
        with subprocess.Popen([sys.executable, "-c", program, str(demo.runs)], env={**os.environ, "PYTHONPATH": path}):
            (page,) = visit(
                address,
                {"name": "now", "path": "/cluster", "axe": False, "expect": [".queue"],
                 "act": [["text", ".queue", "appears"]]},
            )  # fmt: skip
    assert page["problems"] == []
    assert token.read_text().strip() not in page["text"]
    headway(demo.runs, "cancel", "appears")


def test_page_keeps_what_it_knows_when_the_service_dies(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "runs", "--emulate", "2x2")
    service.start()
    service.stop()
    with dashboard(tmp_path) as address:
        (page,) = visit(address, {"name": "dead", "path": "/cluster", "axe": False, "expect": [".nothing"]})
    assert "does not answer" in page["text"]
    assert page["problems"] == []
