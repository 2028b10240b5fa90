"""Advice on a site's Slurm configuration, for runs that save and restart, and a configuration for new sites.

Pure functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.cluster.engines.engine import REQUEUE
from headway.cluster.engines.slurm.parse import Partition
from headway.errors import EngineError

_UNSET = "(null)"
"""What Slurm prints for a setting without a value."""


@dataclass(frozen=True)
class Advice:
    """One setting of a site's configuration."""

    key: str
    found: str
    good: bool
    text: str
    """What the setting does, or would do."""


def parse_configuration(text: str) -> dict[str, str]:
    """The output of `scontrol show config`, by key."""
    pairs = [line.split("=", 1) for line in text.splitlines() if " = " in line]
    conf = {key.strip(): value.strip() for key, value in pairs}
    if "SLURM_VERSION" not in conf:
        raise EngineError(f'scontrol show config printed "{" ".join(text.split())[:80]}", without SLURM_VERSION')
    return conf


def advise(conf: Mapping[str, str], partitions: Mapping[str, Partition]) -> list[Advice]:
    """Advice per setting, the most valuable first."""

    def setting(key: str, good: bool, text: str) -> Advice:
        found = conf.get(key, _UNSET)
        return Advice(key, "not set" if found == _UNSET else found, good, text)

    def at_least(key: str, seconds: int, text: str) -> Advice:
        number = conf.get(key, "").partition(" ")[0]
        return setting(key, number.isdecimal() and int(number) >= seconds, f"{text}; {seconds} s is enough")

    preempts = conf.get("PreemptType", "preempt/none") not in ("preempt/none", _UNSET)
    signals = "preempt_send_user_signal" in conf.get("SlurmctldParameters", "")
    requeues = "jobs whose machine fails are restarted"
    accounts = conf.get("AccountingStorageType", _UNSET) not in (_UNSET, "accounting_storage/none")
    advice = [
        setting(
            "SlurmctldParameters",
            signals or not preempts,
            "preempted runs are signalled, and save"
            if signals
            else "with preempt_send_user_signal, preempted runs would be signalled, and save"
            if preempts
            else "nothing is preempted here; if that changes, add preempt_send_user_signal so that runs save",
        ),
        setting("JobRequeue", True, requeues if conf.get("JobRequeue") == "1" else "runs ask for --requeue themselves"),
        setting(
            "RequeueExit",
            str(REQUEUE) in conf.get("RequeueExit", "").split(","),
            f"with {REQUEUE}, Slurm itself requeues runs that saved, even if the script's own requeue fails",
        ),
        setting(
            "AccountingStorageType",
            accounts,
            "sacct lists old jobs" if accounts else "slurmdbd would list old jobs; without it their folders do",
        ),
        at_least("KillWait", 30, "time between SIGTERM and SIGKILL"),
        at_least("MinJobAge", 60, "how long squeue lists a job that is over"),
        setting(
            "ProctrackType",
            conf.get("ProctrackType") == "proctrack/cgroup",
            "proctrack/cgroup leaves no process behind, and signals reach only the processes they are meant for",
        ),
    ]
    return [*advice, *(_limit(partition) for partition in partitions.values())]


def _limit(partition: Partition) -> Advice:
    key = f"partition {partition.name}"
    if partition.minutes is None:
        return Advice(key, "no limit", True, "runs may last as long as they need")
    return Advice(key, f"{partition.minutes} min", True, "longer runs save before it, and resume")


def slurm_template(
    controller: str, nodes: str, *, cpus: int, memory_mb: int, gpus: int, user: str = "slurm", var: str = "/var"
) -> dict[str, str]:
    """slurm.conf, gres.conf, cgroup.conf, a prolog and an epilog for nodes of one kind, by file name."""
    values = {"controller": controller, "nodes": nodes, "cpus": cpus, "memory_mb": memory_mb, "gpus": gpus}
    values |= {"user": user, "var": var, "requeue": REQUEUE, "last_gpu": gpus - 1}
    templates = {"slurm.conf": _CONF, "gres.conf": _GRES if gpus else "# No GPUs here.\n", "cgroup.conf": _CGROUP}
    files = {name: text.format(**values) for name, text in templates.items()}
    if not gpus:
        files["slurm.conf"] = files["slurm.conf"].replace(" Gres=gpu:0", "").replace("GresTypes=gpu\n", "")
    return files | {"prolog.sh": _PROLOG, "epilog.sh": _EPILOG}


_CONF = """\
# A small Slurm cluster for runs that save and restart. Copy these files to /etc/slurm on every machine.
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

# The kernel tracks the processes of a job: none is left behind, and signals reach only those.
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup

# Jobs share cores, memory and GPUs.
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
DefMemPerCPU=2000

# Preempted runs receive SIGUSR1, have the partition's GraceTime to save, and are requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
# Exit status {requeue} means: saved, restart me.
RequeueExit={requeue}
KillWait=30

# A machine that is silent for a minute is lost, and its jobs start elsewhere; one that returns is used again.
SlurmdTimeout=60
ReturnToService=1
# squeue lists jobs for five minutes after their end.
MinJobAge=300

# With slurmdbd: accounts, fair share, and sacct for old jobs.
#AccountingStorageType=accounting_storage/slurmdbd
#AccountingStorageEnforce=associations,limits,qos
#PriorityType=priority/multifactor

# Check a machine before each job, and drain it if its GPUs do not answer.
#Prolog=/etc/slurm/prolog.sh
#Epilog=/etc/slurm/epilog.sh

NodeName={nodes} CPUs={cpus} RealMemory={memory_mb} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=1-00:00:00 GraceTime=120 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=4:00:00 PriorityTier=10 PreemptMode=OFF
"""
_GRES = """\
# The GPUs of every node, as device files; AutoDetect=nvml finds them and their links if Slurm was built with NVML.
Name=gpu File=/dev/nvidia[0-{last_gpu}]
"""
_CGROUP = """\
# Jobs see only the cores, memory and GPUs that they asked for.
ConstrainCores=yes
ConstrainRAMSpace=yes
ConstrainDevices=yes
"""
_PROLOG = """\
#!/bin/bash
# Before each job, as root: drain a machine whose GPUs do not answer; the job starts elsewhere.
command -v nvidia-smi >/dev/null || exit 0
timeout 30 nvidia-smi --query-gpu=uuid --format=csv,noheader >/dev/null || exit 1
"""
_EPILOG = """\
#!/bin/bash
# After each job, as root: drain a machine that has processes left on its GPUs.
command -v nvidia-smi >/dev/null || exit 0
for gpu in ${SLURM_JOB_GPUS//,/ }; do
  left=$(timeout 30 nvidia-smi --id="$gpu" --query-compute-apps=pid --format=csv,noheader) || exit 1
  [ -z "$left" ] || { echo "left on GPU $gpu: $left" >&2; exit 1; }
done
"""
