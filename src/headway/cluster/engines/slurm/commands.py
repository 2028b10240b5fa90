"""Slurm's commands: run with a limit, and one sentence with Slurm's own words when they fail."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from headway.cluster.engines.scripts import passed_on
from headway.errors import EngineError, UsageError

__all__ = ["PATIENCE_S", "SlurmRefused", "run"]

PATIENCE_S = 60.0
"""A controller under load takes its time; one that needs longer is not there."""

_OF_THE_REQUEST = (
    "Requested node configuration is not available",
    "More processors requested than permitted",
    "Node count specification invalid",
    "Invalid generic resource",
    "Memory specification can not be satisfied",
    "Requested time limit is invalid",
    "Invalid job array specification",
    "Invalid node name specified",
)
"""Words of Slurm's that say that the request is wrong, and no matter of accounts or daemons."""
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


class SlurmRefused(EngineError):
    """A command of Slurm's failed; what it said is `words`."""

    def __init__(self, message: str, words: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.words = words


def run(*command: str, secrets: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S) -> str:
    """What a command prints. It sees of our environment what every job does, so that no SBATCH_ or SLURM_ variable of
    whoever calls changes what is asked for."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment = {**passed_on(), **kept, **(secrets or {})}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=patience_s, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise EngineError(
            f"there is no command {command[0]} here",
            hint="submit where Slurm's commands are: on a login node, or in PATH",
        ) from None
    except OSError as error:
        raise EngineError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"{command[0]} has not answered within {patience_s:g} s",
            hint="nothing was submitted; scontrol ping says whether Slurm's controller is up",
        ) from None
    if done.returncode:
        raise refusal(command, done.stderr or done.stdout, done.returncode)
    return done.stdout


def refusal(command: Sequence[str], output: str, status: int) -> EngineError | UsageError:
    """Why a command failed, in its own words."""
    words = " ".join(output.split()) or f"exit status {status}"
    if any(known in words for known in _OF_THE_REQUEST):
        return UsageError(
            f'Slurm can never run it: {command[0]} said "{words}"',
            hint="headway nodes --engine slurm shows what there is",
        )
    hint = "scontrol ping says whether Slurm's controller is up"
    if "partition" in words:
        hint = "sinfo lists the partitions; `partition` in engines.toml names yours"
    elif "account" in words or "qos" in words:
        hint = "sacctmgr show associations user=$USER lists yours; `account` and `qos` in engines.toml name them"
    return SlurmRefused(f'{command[0]} failed: "{words}"', words, hint)
