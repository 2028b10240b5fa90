"""Run Slurm's commands with a timeout, and explain their failures in one sentence with Slurm's own message."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from headway.cluster.engines.scripts import inherited_environment
from headway.errors import EngineError, UsageError

PATIENCE_S = 60.0
"""Timeout of a command: a controller under load is slow."""

_BAD_REQUEST = (
    "Requested node configuration is not available",
    "More processors requested than permitted",
    "Node count specification invalid",
    "Invalid generic resource",
    "Memory specification can not be satisfied",
    "Requested time limit is invalid",
    "Invalid job array specification",
    "Invalid node name specified",
)
"""Messages of Slurm's that blame the request, not accounts or daemons."""
_SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")


class SlurmRefused(EngineError):
    """A Slurm command failed; `output` is what it printed."""

    def __init__(self, message: str, output: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.output = output


def run(*command: str, secrets: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S) -> str:
    """Run a command and return its output. It sees only the environment that every job inherits, so that no SBATCH_ or
    SLURM_ variable of the caller changes the request."""
    slurm = {name: os.environ[name] for name in _SLURM_VARIABLES if name in os.environ}
    environment = {**inherited_environment(), **slurm, **(secrets or {})}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=patience_s, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise EngineError(
            f"command {command[0]} not found",
            hint="submit from a login node, or add Slurm's commands to PATH",
        ) from None
    except OSError as error:
        raise EngineError(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"{command[0]} did not answer within {patience_s:g} s",
            hint="nothing was submitted; check Slurm's controller with scontrol ping",
        ) from None
    if done.returncode:
        raise refusal(command, done.stderr or done.stdout, done.returncode)
    return done.stdout


def refusal(command: Sequence[str], output: str, status: int) -> EngineError | UsageError:
    """The error for a command that failed, with its own message."""
    output = " ".join(output.split()) or f"exit status {status}"
    if any(message in output for message in _BAD_REQUEST):
        return UsageError(
            f'Slurm can never run this job: {command[0]} printed "{output}"',
            hint="headway nodes --engine slurm shows what there is",
        )
    hint = "check Slurm's controller with scontrol ping"
    if "partition" in output:
        hint = "sinfo lists the partitions; set `partition` in engines.toml"
    elif "account" in output or "qos" in output:
        hint = "sacctmgr show associations user=$USER lists yours; set `account` and `qos` in engines.toml"
    return SlurmRefused(f'{command[0]} failed: "{output}"', output, hint)
