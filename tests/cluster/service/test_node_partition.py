"""Real nodes in network namespaces, whose cables are pulled while jobs run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from eventually import eventually
from headway.cluster.service.connection import ADDRESS, service_folder
from namespaces import Network, made_network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
HEADWAY = [sys.executable, "-c", "from headway.cli.main import main; main()"]
SERVICE = 2
"""The machine of the service; the others are nodes."""


@dataclass
class Nodes:
    """A service and two nodes, each on a machine of its own."""

    network: Network
    folder: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, number: int, *words: str) -> None:
        inside = ["ip", "netns", "exec", self.network.space(number)]
        with (self.folder / f"log-{number}").open("ab") as log:
            command = [*inside, *HEADWAY, *words]
            self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def ask(self, *words: str) -> Any:
        """The --json output of a verb on the service's machine."""
        inside = ["ip", "netns", "exec", self.network.space(SERVICE)]
        at = words[: words.index("--")] if "--" in words else words
        command = [*at, "--runs", str(self.folder / "runs"), "--json", *words[len(at) :]]
        done = subprocess.run([*inside, *HEADWAY, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr, self.logs())
        return json.loads(done.stdout)

    def states(self) -> dict[str, str]:
        return {row["id"]: row["state"] for row in self.ask("queue")}

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def until(self, condition: Any) -> None:
        eventually(condition, self.logs, poll_s=0.5)


@pytest.fixture
def network() -> Iterator[Network]:
    yield from made_network()


@pytest.fixture
def nodes(network: Network, tmp_path: Path) -> Iterator[Nodes]:
    nodes, runs = Nodes(network, tmp_path), tmp_path / "runs"
    options = ("--port", "8400", "--no-local-node", "--give-up-after", "60")
    nodes.start(SERVICE, "up", "--host", network.address(SERVICE), "--runs", str(runs), *options)
    nodes.until((service_folder(runs) / ADDRESS).exists)
    address = json.loads((service_folder(runs) / ADDRESS).read_text())
    for number in range(2):
        token = tmp_path / f"token-{number}"
        token.write_text(nodes.ask("node", "token")["token"])
        place = ("--name", f"m{number}", "--folder", str(tmp_path / f"node-{number}"), "--jobs-as-root")
        trust = ("--token-file", str(token), "--fingerprint", address["fingerprint"])
        nodes.start(number, "node", "join", address["url"], *trust, *place, "--cpus", "2", "--tenant", "default")
    nodes.until(lambda: sum(node["state"] == "free" for node in nodes.ask("nodes", "--engine", "service")) == 2)
    yield nodes
    for process in nodes.processes.values():
        process.terminate()
    for process in nodes.processes.values():
        process.wait()


SCRIPT = """
echo "$HEADWAY_MACHINES $HEADWAY_START" >>starts
until [ -e end ]; do sleep 0.1; done
echo "$HEADWAY_START" >>ends
"""


def submit(nodes: Nodes, folder: Path) -> str:
    folder.mkdir()
    script = f"cd {folder} && {SCRIPT}"
    return str(nodes.ask("submit", "--cpus", "2", "--name", folder.name, "--", "bash", "-c", script)["job"])


def test_short_cut_changes_nothing(nodes: Nodes, network: Network, tmp_path: Path) -> None:
    job = submit(nodes, tmp_path / "job")
    nodes.until(lambda: nodes.states() == {job: "running"})
    network.pull(0)
    network.pull(1)
    nodes.until(lambda: all(node["state"] == "away" for node in nodes.ask("nodes", "--engine", "service")))
    network.plug(0)
    network.plug(1)
    (tmp_path / "job" / "end").touch()
    nodes.until(lambda: nodes.states() == {})
    assert (tmp_path / "job" / "ends").read_text() == "1\n"


def test_job_of_a_node_that_is_cut_off_for_long_runs_elsewhere_and_is_killed_there(
    nodes: Nodes, network: Network, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    submit(nodes, folder)
    nodes.until((folder / "starts").exists)
    cut = int((folder / "starts").read_text()[1])
    network.pull(cut)
    nodes.until(lambda: len((folder / "starts").read_text().splitlines()) == 2)
    assert (folder / "starts").read_text().splitlines() == [f"m{cut} 1", f"m{1 - cut} 2"]
    network.plug(cut)
    nodes.until(lambda: not list((tmp_path / f"node-{cut}" / "starts").iterdir()))
    nodes.until(lambda: all(node["state"] != "away" for node in nodes.ask("nodes", "--engine", "service")))
    (folder / "end").touch()
    nodes.until(lambda: nodes.states() == {})
    assert (folder / "ends").read_text() == "2\n"
