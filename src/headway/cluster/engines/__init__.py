"""What starts processes on machines.

engine.py        the interface, and the words that all engines share
local*.py        this machine, with a queue of its own
slurm*.py        Slurm, with the rights that every user has
"""

from headway.cluster.engines.engine import OVER, REQUEUE, Engine, JobStatus, LaunchRequest, Machine, State

__all__ = ["OVER", "REQUEUE", "Engine", "JobStatus", "LaunchRequest", "Machine", "State"]
