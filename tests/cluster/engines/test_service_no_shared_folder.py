"""Nodes that see no folder of whoever submits: commands, their logs, and a run that moves through its store."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from engine_runs import ONE_CORE, demo, train_uninterrupted

from conftest import Lived
from eventually import eventually
from headway.agent.remote.store_mirror import fetch_run
from headway.cluster.service.connection import ADDRESS, connect, service_folder
from headway.cluster.submit import runs as submitting
from headway.hardware import parse_on
from headway.state.object_store import open_store
from headway.state.store_checkpoint import list_remote
from headway.track import read_run
from service_process import ServiceProcess, headway, headway_json

HIDE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs nothing "$0" && exec "$@"']
HEADWAY = [sys.executable, "-c", "from headway.cli.main import main; main()"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to hide a folder from a process"),
]


@dataclass
class Site:
    """A service, the machine that submits, whose folder no node sees, and two nodes."""

    service: ServiceProcess
    submitting: Path

    @property
    def runs(self) -> Path:
        return self.service.runs

    def state(self, job: str) -> str:
        return str(connect(self.runs).get(f"/api/v1/jobs/{job}")[0]["state"])

    def place(self, job: str) -> str:
        """The node of a job."""
        return str(connect(self.runs).get(f"/api/v1/jobs/{job}")[0]["placement"][0]["node"])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    here = tmp_path / "here"
    (here / "work").mkdir(parents=True)
    if subprocess.run([*HIDE, str(here), "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot hide a folder from a process here")
    own = f'export TMPDIR={tmp_path}/$(basename "$(dirname "$(dirname "$HEADWAY_SCRATCH")")"); mkdir -p "$TMPDIR"'
    (tmp_path / "engines.toml").write_text(f"[service]\ngrace_s = 30\nsetup = {[own, ONE_CORE]!r}\n")
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    service = ServiceProcess(here / "runs", "--no-local-node", "--tls")
    service.start()
    with ExitStack() as stack:
        stack.callback(service.stop)
        address = json.loads((service_folder(service.runs) / ADDRESS).read_text())
        url, trust = address["url"], address["fingerprint"]
        for number in range(2):
            token = tmp_path / f"token-{number}"
            token.write_text(connect(service.runs).post("/api/v1/join-tokens", {})["token"])
            words = ["--token-file", str(token), "--fingerprint", trust, "--name", f"m{number}", "--jobs-as-root"]
            words += ["--folder", str(tmp_path / f"node-{number}"), "--cpus", "2"]
            with (tmp_path / f"agent-{number}.log").open("wb") as log:
                command = [*HIDE, str(here), *HEADWAY, "node", "join", url, *words]
                agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(agent.wait)
            stack.callback(agent.terminate)
        healthy = lambda: [node["state"] for node in connect(service.runs).get("/api/v1/nodes")] == ["healthy"] * 2  # noqa: E731
        eventually(healthy, lambda: "".join(path.read_text() for path in tmp_path.glob("agent-*.log")))
        yield Site(service, here)


def test_uploaded_command_and_its_logs_need_no_common_folder(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.submitting / "work")
    (site.submitting / "work" / "train.py").write_text(
        "import os, pathlib\nprint('on', os.environ['HEADWAY_MACHINE'], pathlib.Path('words').read_text())\n"
    )
    (site.submitting / "work" / "words").write_text("uploaded")
    python = (sys.executable, "train.py")
    headway(site.runs, "submit", "--upload", "--machines", "2", "--cpus", "2", "--name", "seen", "--", *python)
    printed = headway(site.runs, "logs", "seen", "--follow").splitlines()
    assert sorted(line for line in printed if not line.startswith("==")) == ["on 0 uploaded", "on 1 uploaded"]
    assert headway(site.runs, "logs", "seen", "--rank", "1") == "== 1/0001-1.log\non 1 uploaded\n"
    assert not list((site.runs / ".commands").glob("*/jobs"))
    headway(site.runs, "submit", "--name", "blind", "--", *python)
    eventually(lambda: site.state("blind") == "failed")
    work = site.submitting / "work"
    assert f"headway: cannot enter {work} on {socket.gethostname()}: submit" in headway(site.runs, "logs", "blind")


def test_run_moves_to_a_node_that_never_saw_it(site: Site, tmp_path: Path, dataset: Path) -> None:
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store"
    stored = {"checkpoint__store__url": url, "checkpoint__store__every_steps": 40}
    recipe = demo(dataset, train__steps=240, **stored)
    uninterrupted = train_uninterrupted(recipe, tmp_path / "alone", workers=1)
    submitted = submitting.submit_run(recipe, site.runs, parse_on("cpux1"), "service", "demo", shared=False)
    job, store = submitted.job, open_store(f"{url}/demo")

    def logs() -> str:
        return headway(site.runs, "logs", job)

    eventually(lambda: any(entry.step >= 40 for entry in list_remote(store)), logs)
    first = site.place(job)
    headway(site.runs, "drain", first)
    eventually(lambda: site.state(job) in ("finished", "failed", "cancelled"), logs)
    assert (site.state(job), site.place(job) != first) == ("finished", True), logs()
    listed = connect(site.runs).get(f"/api/v1/jobs/{job}/logs")
    assert [log["start"] for log in listed] == [1, 2]
    result = Lived(fetch_run(f"{url}/demo", tmp_path / "fetched"), None)
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), logs()
    assert len({record.header.attempt for record in read_run(result.run)}) >= 2
    assert headway_json(site.runs, "queue") == []
