"""Machines excluded from a run: one line each in its folder, with when and why; engines read it before a restart.

gpu-17<tab>1789643211<tab>worker 9 was killed by signal 7 (SIGBUS), in 2 attempts in a row
"""

import contextlib
import re
from pathlib import Path

from headway.track.run_folder import RunFolder

FORGIVEN_S = 86400.0
"""A machine is used again after a day: it may have been repaired."""
_MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def note_suspect(run: RunFolder, machine: str, why: str, now: float) -> None:
    """Exclude a machine from a run from now on."""
    if _MACHINE.fullmatch(machine):
        line = f"{machine}\t{now:.0f}\t{' '.join(why.split())}\n"
        with run.suspects_file.open("a") as file:
            file.write(line)


def read_suspects(folder: Path, now: float) -> dict[str, str]:
    """Return the machines excluded from the run in this folder, with the reason for each."""
    suspects = dict[str, str]()
    with contextlib.suppress(FileNotFoundError):
        for line in RunFolder(folder).suspects_file.read_text().splitlines():
            machine, when, why = (*line.split("\t", 2), "", "")[:3]
            if _MACHINE.fullmatch(machine) and when.isdecimal() and now - float(when) < FORGIVEN_S:
                suspects[machine] = why
    return suspects
