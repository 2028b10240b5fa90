"""A real Slurm on this machine: munged, slurmctld and a slurmd per virtual node, with fake GPUs."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eventually import eventually

NODES = 4
GPUS = 4
CPUS = 8
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SLURM_CONF = """\
ClusterName=headway
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0,default_queue_depth=500
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=8
SlurmctldTimeout=30
KillWait=1
MinJobAge={min_job_age}
InactiveLimit=0
MpiDefault=none
SlurmctldDebug=debug
SlurmdDebug=debug
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL MaxTime=1 State=UP PriorityTier=1
"""


@dataclass
class SlurmCluster:
    """The daemons of a Slurm, and their folder."""

    folder: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(NODES)]

    def start_node(self, name: str) -> None:
        command = ["slurmd", "-D", "-N", name, "-f", str(self.conf)]
        self.processes[name] = self._start(command)

    def lose_node(self, name: str) -> None:
        """Kill all that runs there, as when the power fails; first whatever would report it."""
        daemon, jobs = self.processes.pop(name), self.processes_on(name)
        daemon.kill()
        for pid in [*{_step_daemon(pid) for pid in jobs}, *jobs]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def trace(self, job: str) -> str:
        """What Slurm's daemons logged about a job."""
        names = re.compile(rf"Job(Id|ID)={job}\b|\[{job}\.|\bjob {job}\b", re.IGNORECASE)
        logs = {path.stem: path.read_text().splitlines() for path in sorted(self.folder.glob("slurm*.log"))}
        return "\n".join(f"{name}: {line}" for name, lines in logs.items() for line in lines if names.search(line))

    def processes_on(self, name: str) -> list[int]:
        """The processes of jobs on a node, and their slurmstepds."""
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (path / "environ").read_bytes().split(b"\0")
                if {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.conf}".encode()} <= set(variables):
                    pids.append(int(path.name))
        return pids

    def _start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            environment = os.environ | {"SLURM_CONF": str(self.conf)}
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)


def _step_daemon(pid: int) -> int:
    """The slurmstepd above a process of a job, else the process itself."""
    ancestor = pid
    while ancestor > 1:
        try:
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{ancestor}/status").read_text().splitlines())
        except OSError:
            return pid
        if status["Name"].startswith("slurmstepd"):
            return ancestor
        ancestor = int(status["PPid"])
    return pid


def start_cluster(folder: Path, min_job_age: int = 300) -> SlurmCluster:
    """Start daemons and wait for idle nodes. Skip the test if Slurm is not installed."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("only root can start the daemons of Slurm: sudo -E make test")
    cluster = SlurmCluster(folder)
    _write_configuration(cluster, min_job_age)
    cluster.processes["munged"] = cluster._start(
        ["munged", "--foreground", "--force"]
        + [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        + [f"--socket={folder}/munge.sock"]
    )
    _until(lambda: (folder / "munge.sock").exists(), cluster)
    cluster.processes["slurmctld"] = cluster._start(["slurmctld", "-D", "-f", str(cluster.conf)])
    for name in cluster.nodes:
        cluster.start_node(name)
    _until(lambda: _idle(cluster) == NODES, cluster)
    return cluster


def stop_cluster(cluster: SlurmCluster) -> None:
    """Kill the daemons, and what they have left."""
    for process in reversed(cluster.processes.values()):
        process.kill()
        process.wait()
    for pid in _left_by(cluster):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _left_by(cluster: SlurmCluster) -> list[int]:
    """Processes of this Slurm's jobs, slurmstepds first."""
    pids = dict[int, bool]()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (path / "environ").read_bytes().split(b"\0")
            is_step_daemon = (path / "comm").read_text().startswith("slurmstepd")
            of_a_job = any(variable.startswith(b"SLURM_JOB_ID=") for variable in variables)
            if f"SLURM_CONF={cluster.conf}".encode() in variables and (is_step_daemon or of_a_job):
                pids[int(path.name)] = is_step_daemon
    return sorted(pids, key=lambda pid: not pids[pid])


@contextlib.contextmanager
def slurm_cluster(folder: Path, min_job_age: int = 300) -> Iterator[SlurmCluster]:
    cluster = start_cluster(folder, min_job_age)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(cluster.conf)
    try:
        yield cluster
    finally:
        stop_cluster(cluster)
        os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)


def _write_configuration(cluster: SlurmCluster, min_job_age: int) -> None:
    folder, host = cluster.folder, socket.gethostname()
    for name in ("state", "dev", *(f"spool-{node}" for node in cluster.nodes)):
        (folder / name).mkdir()
    for number in range(GPUS):
        os.mknod(folder / f"dev/nvidia{number}", 0o20666, os.makedev(1, 3))
    ports = _free_ports(NODES + 1)
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=4000"
        f" Gres=gpu:{GPUS}"
        for name, port in zip(cluster.nodes, ports[1:], strict=True)
    ]
    text = SLURM_CONF.format(
        host=f"{host}(127.0.0.1)", port=ports[0], folder=folder, nodes="\n".join(nodes), min_job_age=min_job_age
    )
    cluster.conf.write_text(text)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/nvidia[0-{GPUS - 1}]\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]


def _idle(cluster: SlurmCluster) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-p", "batch", "-o", "%T"],
        env=os.environ | {"SLURM_CONF": str(cluster.conf)},
        capture_output=True,
        text=True,
    )
    return done.stdout.split().count("idle")


def _until(condition: Callable[[], bool], cluster: SlurmCluster) -> None:
    def holds() -> bool:
        dead = [name for name, process in cluster.processes.items() if process.poll() is not None]
        assert not dead, f"{', '.join(dead)} ended:\n{logs()}"
        return condition()

    def logs() -> str:
        files = cluster.folder.glob("*.*o[ug]*")
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in files)

    try:
        eventually(holds, logs, poll_s=0.1)
    except BaseException:
        stop_cluster(cluster)
        raise
