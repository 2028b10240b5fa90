"""The scripts that a job is for Slurm: pure functions of what is wanted."""

import math
import re
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from headway.cluster.engines.engine import EARLY_S, REQUEUE, LaunchRequest
from headway.cluster.engines.scripts import task_script
from headway.errors import UsageError

__all__ = ["SITE", "batch_script", "check_site", "slurm_task"]

SITE = {
    "partition": "the partition, or several with commas",
    "account": "the account that pays",
    "qos": "the quality of service",
    "constraint": "features that nodes must have",
    "switches": "at most so many switches between the nodes: 1, or 1@24:00:00",
    "reservation": "a reservation to run in",
    "gres": "what a GPU is called: gpu, or gpu:h100",
    "exclusive": "yes has whole nodes",
    "restart": "requeue (the default), or resubmit: how a job that has saved is started again",
}
"""What `site` may say, and what it means."""

_VALUE = re.compile(r"[A-Za-z0-9_.,:@&|*()\[\]/+=-]+")
"""Anything that a line of a script takes as it is."""
_PYXIS = ("container_image", "container_mounts")
"""Of containers, set by `container` and `mounts` where `runtime` is pyxis: quoted, whatever they hold."""
_OPTIONS = ("partition", "account", "qos", "constraint", "switches", "reservation")
MIB = 2**20

_SCRIPT = """\
# {name}: made by Headway. One command a machine; SIGUSR1 has it save, and {requeue} has it started again.
{place}
here="$job${{SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}}"
heard=1 steps= timer= forced= told= ended= lost= missed= unwanted=
{channel}
pass_on() {{
  heard=1 told=${{told:-$SECONDS}}
  [ -z "$steps" ] || kill -USR1 "$steps"
  if cancelled && [ -z "$timer" ]; then
    (sleep {grace}; scancel "$SLURM_JOB_ID") & timer=$!
  fi
}}
trap pass_on USR1
trap 'forced=1; pass_on' TERM
cancelled && exit 0
mkdir -p -- "$here" || exit 1
exec >>"$here/script.log" 2>&1

HEADWAY_MACHINES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)
{count}
note
HEADWAY_LOG=$(printf '%s/%04d' "$here" "$start")
export HEADWAY_MACHINES HEADWAY_LOG{array}

before=$(($(wc -l <"$here/script.log") + 1))
status={requeue}  # of one that was told before it began
if [ -z "$told" ]; then
  srun --export=ALL --nodes={machines} --ntasks={machines} --ntasks-per-node=1 --cpus-per-task={cpus} \\
    --kill-on-bad-exit=0 --wait=0{keep} --output=none --error=none{container} bash {task} &
  steps=$!
  while [ "$heard" = 1 ]; do heard=0; wait "$steps"; status=$?; done
fi
[ -z "$timer" ] || kill "$timer"
[ -z "$forced" ] || [ "$status" != 0 ] || status=143  # srun says 0 of steps that were ended for it
# A command that was told before it could listen has died of it, and has lost nothing.
[ "${{told:-{early}}}" -ge {early} ] || [ "$status" != 138 ] || status={requeue}
# Commands that know how the whole ended have said so, whatever has become of the others.
for end in {requeue} 0; do
  ! awk 'FNR == 1' "$HEADWAY_LOG"-*.end 2>/dev/null | grep -qx "$end" || status=$end
done
said_by_srun() {{ tail -n "+$before" "$here/script.log" | sed -n 's/^srun: error: //p'; }}
lost=$(said_by_srun | sed -n 's/^Node failure on //p' | sort -u | paste -sd, -)
# Machines that srun no longer reaches are lost too, often minutes before Slurm itself misses them.
unreachable=$(said_by_srun | awk -v machines="$HEADWAY_MACHINES" '
  BEGIN {{ split(machines, name, ",") }}
  / failed on node .*: (Communication|Message receive|Socket timed out|Zero Bytes)/ {{
    sub(/.* failed on node /, ""); sub(/:.*/, ""); print
  }}
  /(io error|Cannot communicate).* node [0-9]+/ {{ sub(/.* node /, ""); print name[$1 + 1] }}
' | sort -u | paste -sd, -)
[ -z "$unreachable" ] || [ "$status" = 0 ] || status={requeue}
[ -n "$lost" ] && missed=1 || lost=$unreachable
ended=$status
note

if [ "$status" = {requeue} ] && ! cancelled; then
  # Machines that the command wants to do without: a job that was put back could have them again.
  suspects=$(awk 'FNR > 1' "$HEADWAY_LOG"-*.end 2>/dev/null)
  suspects=$(printf '%s\\n' $suspects ${{unreachable//,/ }} | sort -u | paste -sd, -)
  {again}
  unset "${{!SBATCH_@}}"
  follow() {{ sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" \\
    ${{SLURM_ARRAY_TASK_ID:+--array="$SLURM_ARRAY_TASK_ID"}} "$@" "$job/job.sh"; }}
  next=$(trap '' TERM; follow ${{suspects:+--exclude="$suspects{avoid}"}} || follow) && followed
fi
! cancelled || [ "$status" != {requeue} ] || status=143  # where RequeueExit has it, Slurm would start it again
exit "$status"
"""

_REQUEUE = """\
said=
  if [ -z "$suspects" ] || [ -n "$missed" ] || [ -n "$forced" ]; then
    # Slurm ends all of this as soon as it has put the job back; a scontrol that died of it would seem to have failed.
    trap 'forced=1' TERM; trap '' USR1
    said=$(trap '' TERM; scontrol requeue "$SLURM_JOB_ID" 2>&1) && said="pending execution" || echo "$said"
  fi
  # Where a machine was lost, Slurm has put it back by itself, and a job that follows it would be one too many.
  if [[ $said == *"pending execution"* ]]; then
    # Until Slurm ends us: a word of our own would be taken for one of the next start.
    [ -n "$forced" ] || { sleep 60 & wait $!; kill $! 2>/dev/null; }
    exit "$status"
  fi"""


_SHARED = {
    "place": """\
job={job}
[ -d "$job" ] || exit 0  # it was taken back before it could start""",
    "channel": """\
cancelled() {{ [ -e "$job/cancelled" ] || [ -e "$here/cancelled" ]; }}
note() {{
  if [ -z "$ended" ]; then echo "$(date +%s) $HEADWAY_MACHINES" >>"$here/starts"; return; fi
  [ -z "$lost" ] || echo "$start $lost" >>"$here/lost"
  echo "$start $ended" >>"$here/ended"
}}
followed() {{ echo "${{next%%;*}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}" >>"$here/ids"; }}""",
    "count": """\
start=$(($(cat "$here/starts" 2>/dev/null | wc -l) + 1))
# One that Slurm has put back although it is done, or although another job follows it, has nothing to do.
[ "$(tail -n 1 "$here/ended" 2>/dev/null)" != "$((start - 1)) 0" ] || exit 0
newest=$(tail -n 1 "$here/ids" 2>/dev/null)
[ "${{newest%_*}}" -le "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}" ] 2>/dev/null || [ -z "$newest" ] || exit 0""",
    "task": '"$job/task.sh"',
}
"""A folder that all machines see tells how a job stands, and takes wishes."""

_OWN = """\
base=/tmp/headway-$(id -u)
(umask 077; mkdir -p -- "$base") && [ -O "$base" ] && [ ! -L "$base" ] || exit 1"""
"""The folder of a machine's own, where nobody else may read or write."""

_APART = {
    "place": _OWN + "\njob=$base/{key}",
    "channel": """\
trap 'unwanted=1; pass_on' USR2
cancelled() {{ [ -n "$unwanted" ]; }}
note() {{
  scontrol update JobId="$SLURM_JOB_ID" \\
    Comment="{key} starts=$start on=$HEADWAY_MACHINES${{ended:+ ended=$ended}}${{lost:+ lost=$lost}}"
}}
followed() {{ :; }}  # whoever looks finds it by its comment
IFS= read -r -d '' task <<'{key}'
{text}{key}""",
    "count": """\
start=$((${{HEADWAY_STARTS:-0}} + ${{SLURM_RESTART_COUNT:-0}} + 1))
[ -e "$job/job.sh" ] || cp -- "$0" "$job/job.sh"
export HEADWAY_STARTS="$start\"""",
    "task": '-c "$task"',
}
"""Without one, the job's comment in Slurm tells how it stands; it hears of wishes by signals, and has all it needs."""


def batch_script(request: LaunchRequest, job: Path, minutes: int | None) -> str:
    """What sbatch is given. `job` is the folder of all that the script reads and leaves; machines that do not see it
    know its name alone. `minutes` None is no limit."""
    check_site(request.site)
    requeue = request.site.get("restart", "requeue") == "requeue"
    known = {"job": shlex.quote(str(job)), "key": job.name, "text": slurm_task(request)}
    own = {name: text.format(**known) for name, text in (_SHARED if request.shared else _APART).items()}
    text = _SCRIPT.format(
        **own,
        name=request.name,
        requeue=REQUEUE,
        array="" if request.array is None else ' HEADWAY_ARRAY_INDEX="$SLURM_ARRAY_TASK_ID"',
        early=EARLY_S,
        grace=f"{request.grace_s:g}",
        machines=request.machines,
        cpus=request.cpus,
        container=_container(request),
        keep=" --no-kill" if request.spares else "",
        avoid="".join(f",{_plain('avoid', name)}" for name in request.avoid),
        again=_REQUEUE if requeue else ": # by a job that follows this one",
    )
    more = [] if request.shared else [f"comment={job.name}", "chdir=/tmp"]
    options = "".join(f"#SBATCH --{option}\n" for option in [*_options(request, minutes), *more])
    return f"#!/bin/bash\n{options}{text}"


def _container(request: LaunchRequest) -> str:
    """What srun is told of a container, where pyxis is a part of Slurm."""
    image, mounts = (request.site.get(key) for key in _PYXIS)
    if image and not request.shared:
        mounts = ",".join(filter(None, (mounts, "/tmp:/tmp")))  # where the machine's own folder lies
    told = zip(_PYXIS, (image, mounts), strict=True)
    words = [f"--{key.replace('_', '-')}={value}" for key, value in told if value]
    return "".join(f" \\\n    {shlex.quote(word)}" for word in words)


def slurm_task(request: LaunchRequest) -> str:
    """What srun starts on each machine."""
    first = [
        *([] if request.shared else [_OWN, 'mkdir -p -- "${HEADWAY_LOG%/*}" || exit 1']),
        'exec >>"$HEADWAY_LOG-$SLURM_NODEID.log" 2>&1 </dev/null',
        'export HEADWAY_MACHINE="$SLURM_NODEID" HEADWAY_END="$HEADWAY_LOG-$SLURM_NODEID.end"',
    ]
    return task_script(request, first, folder=None if request.shared else '"${HEADWAY_LOG%/*}"')


def _options(request: LaunchRequest, minutes: int | None) -> list[str]:
    """sbatch's options, in the order of what a reader asks first."""
    site = request.site
    found = [
        f"job-name={request.name}",
        *(f"{key}={site[key]}" for key in _OPTIONS if site.get(key)),
        f"nodes={request.machines}",
        "ntasks-per-node=1",
        f"cpus-per-task={request.cpus}",
    ]
    if request.gpus:
        found.append(f"gres={site.get('gres') or 'gpu'}:{request.gpus}")
    if request.memory_bytes is not None:
        found.append(f"mem={math.ceil(request.memory_bytes / MIB)}M")
    if minutes is not None:
        found.append(f"time={minutes}")
    if request.array is not None:
        found.append(f"array=0-{request.array - 1}" + (f"%{request.at_once}" if request.at_once else ""))
    if request.avoid:
        found.append(f"exclude={','.join(_plain('avoid', name) for name in request.avoid)}")
    if site.get("exclusive") == "yes":
        found.append("exclusive")
    if request.spares:
        found.append("no-kill")  # when a node fails, the others go on
    grace = min(max(1, math.ceil(request.grace_s)), 65535)
    return [*found, f"signal=B:USR1@{grace}", "requeue", "open-mode=append", "output=/dev/null"]


def check_site(site: Mapping[str, str]) -> None:
    """Refuse what Slurm would not understand, or a script would."""
    for key, value in site.items():
        if key in _PYXIS:
            continue
        if key not in SITE:
            near = get_close_matches(key, SITE, n=3, cutoff=0.5) or list(SITE)
            raise UsageError(f"the slurm engine has no setting {key!r}", hint=f"did you mean {' or '.join(near)}?")
        _plain(key, value)
    for key, allowed in {"restart": ("requeue", "resubmit"), "exclusive": ("yes", "no")}.items():
        if site.get(key, allowed[0]) not in allowed:
            raise UsageError(f"{key} is {site[key]!r}", hint=f"it may be {' or '.join(allowed)}")


def _plain(key: str, value: str) -> str:
    if not _VALUE.fullmatch(value):
        raise UsageError(f"{key} is {value!r}, which is no word that Slurm takes", hint="letters, digits, commas")
    return value
