"""What a site's Slurm lacks for runs that save and come back, and files for people who set one up: pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.cluster.engines.engine import REQUEUE
from headway.cluster.engines.slurm.parse import Partition
from headway.errors import EngineError

__all__ = ["Advice", "advise", "parse_configuration", "slurm_template"]

SHORT_KILL_WAIT_S = 30
SHORT_JOB_AGE_S = 60


@dataclass(frozen=True)
class Advice:
    """One thing that a site's configuration decides."""

    key: str
    found: str
    good: bool
    text: str
    """What it brings as it is, or would bring."""


def parse_configuration(text: str) -> dict[str, str]:
    """What `scontrol show config` prints, by key."""
    pairs = [line.split("=", 1) for line in text.splitlines() if " = " in line]
    found = {key.strip(): value.strip() for key, value in pairs}
    if "SLURM_VERSION" not in found:
        raise EngineError(f'scontrol show config said "{" ".join(text.split())[:80]}", which has no SLURM_VERSION')
    return found


def advise(conf: Mapping[str, str], partitions: Mapping[str, Partition]) -> list[Advice]:
    """What there is and what is missing, the most worth first."""
    preempts = conf.get("PreemptType", "preempt/none") not in ("preempt/none", "(null)")
    told = "preempt_send_user_signal" in conf.get("SlurmctldParameters", "")
    found = [
        Advice(
            "SlurmctldParameters",
            conf.get("SlurmctldParameters", "(null)"),
            told or not preempts,
            "runs that are preempted are told, and save"
            if told
            else "preempt_send_user_signal would tell runs that are preempted, so that they save"
            if preempts
            else "nothing is preempted here; if that changes, preempt_send_user_signal has runs told",
        ),
        _requeues(conf),
        Advice(
            "RequeueExit",
            conf.get("RequeueExit", "(null)"),
            str(REQUEUE) in conf.get("RequeueExit", "").split(","),
            f"{REQUEUE} has runs that saved put back by Slurm itself, where the script's own requeue fails",
        ),
        _accounts(conf),
        _seconds(conf, "KillWait", SHORT_KILL_WAIT_S, "so long a job has after SIGTERM"),
        _seconds(conf, "MinJobAge", SHORT_JOB_AGE_S, "so long squeue tells how a job ended"),
        Advice(
            "ProctrackType",
            conf.get("ProctrackType", ""),
            conf.get("ProctrackType") == "proctrack/cgroup",
            "proctrack/cgroup leaves no process behind, and signals reach only whom they are meant for",
        ),
    ]
    return [*found, *(_limit(one) for one in partitions.values())]


def _requeues(conf: Mapping[str, str]) -> Advice:
    value = conf.get("JobRequeue", "")
    text = "jobs whose machine fails are started again" if value == "1" else "runs ask for --requeue themselves"
    return Advice("JobRequeue", value, True, text)


def _accounts(conf: Mapping[str, str]) -> Advice:
    value = conf.get("AccountingStorageType", "(null)")
    there = value not in ("(null)", "accounting_storage/none")
    text = "sacct tells of old jobs" if there else "slurmdbd would tell of old jobs; until then their own folders do"
    return Advice("AccountingStorageType", value, there, text)


def _seconds(conf: Mapping[str, str], key: str, least: int, text: str) -> Advice:
    value = conf.get(key, "")
    number = value.split()[0] if value else ""
    return Advice(key, value, number.isdecimal() and int(number) >= least, f"{text}; {least} s is enough")


def _limit(one: Partition) -> Advice:
    if one.minutes is None:
        return Advice(f"partition {one.name}", "no limit", True, "runs may last as long as they need")
    return Advice(f"partition {one.name}", f"{one.minutes} min", True, "longer runs save before it, and go on")


def slurm_template(
    controller: str, nodes: str, *, cpus: int, memory_mb: int, gpus: int, user: str = "slurm", var: str = "/var"
) -> dict[str, str]:
    """slurm.conf, gres.conf, cgroup.conf, a prolog and an epilog for nodes of one kind, by their file names."""
    values = {"controller": controller, "nodes": nodes, "cpus": cpus, "memory_mb": memory_mb, "gpus": gpus}
    values |= {"user": user, "var": var, "requeue": REQUEUE, "last_gpu": gpus - 1}
    gres = _GRES if gpus else "# No GPUs here.\n"
    found = {"slurm.conf": _CONF, "gres.conf": gres, "cgroup.conf": _CGROUP}
    written = {name: text.format(**values) for name, text in found.items()}
    if not gpus:
        written["slurm.conf"] = written["slurm.conf"].replace(" Gres=gpu:0", "").replace("GresTypes=gpu\n", "")
    return written | {"prolog.sh": _PROLOG, "epilog.sh": _EPILOG}


_CONF = """\
# A small Slurm for runs that save and come back. Put this folder's files into /etc/slurm on every machine.
ClusterName=headway
SlurmctldHost={controller}
SlurmUser={user}
AuthType=auth/munge
StateSaveLocation={var}/spool/slurmctld
SlurmdSpoolDir={var}/spool/slurmd
SlurmctldPidFile={var}/run/slurmctld.pid
SlurmdPidFile={var}/run/slurmd.pid
SlurmctldLogFile={var}/log/slurmctld.log
SlurmdLogFile={var}/log/slurmd.log

# Processes are kept together by the kernel: none is left behind, and a signal reaches whom it is meant for.
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup

# Cores, memory and GPUs are what jobs share.
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
DefMemPerCPU=2000

# Runs that must give way are told with SIGUSR1, have the partition's GraceTime to save, and wait in the queue again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
# Exit status {requeue} says: I have saved, start me again.
RequeueExit={requeue}
KillWait=30

# A machine that says nothing for a minute is lost, and its jobs start elsewhere; one that comes back is used again.
SlurmdTimeout=60
ReturnToService=1
# squeue tells for five minutes how a job ended.
MinJobAge=300

# With slurmdbd: accounts, fair share, and sacct for old jobs.
#AccountingStorageType=accounting_storage/slurmdbd
#AccountingStorageEnforce=associations,limits,qos
#PriorityType=priority/multifactor

# Before a job a machine is looked at, and drained if its GPUs do not answer.
#Prolog=/etc/slurm/prolog.sh
#Epilog=/etc/slurm/epilog.sh

NodeName={nodes} CPUs={cpus} RealMemory={memory_mb} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=1-00:00:00 GraceTime=120 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=4:00:00 PriorityTier=10 PreemptMode=OFF
"""
_GRES = """\
# Every node has its GPUs as these files; AutoDetect=nvml finds them, and their links, where Slurm was built with NVML.
Name=gpu File=/dev/nvidia[0-{last_gpu}]
"""
_CGROUP = """\
# Jobs see the cores, the memory and the GPUs that they asked for, and no others.
ConstrainCores=yes
ConstrainRAMSpace=yes
ConstrainDevices=yes
"""
_PROLOG = """\
#!/bin/bash
# Before each job, as root: a machine whose GPUs do not answer is drained, and the job starts elsewhere.
command -v nvidia-smi >/dev/null || exit 0
timeout 30 nvidia-smi --query-gpu=uuid --format=csv,noheader >/dev/null || exit 1
"""
_EPILOG = """\
#!/bin/bash
# After each job, as root: a machine on whose GPUs something has been left is drained.
command -v nvidia-smi >/dev/null || exit 0
for gpu in ${SLURM_JOB_GPUS//,/ }; do
  left=$(timeout 30 nvidia-smi --id="$gpu" --query-compute-apps=pid --format=csv,noheader) || exit 1
  [ -z "$left" ] || { echo "left on GPU $gpu: $left" >&2; exit 1; }
done
"""
