"""Engines, which start processes on machines.

engine.py        the interface and the types that all engines share
local/           this machine, with its own queue
slurm/           Slurm, with the permissions of an ordinary user
ray/             a Ray cluster
kubernetes/      JobSet manifests for Kubernetes
"""

from headway.cluster.engines.engine import OVER, Engine, JobStatus, LaunchRequest, Machine

__all__ = ["OVER", "Engine", "JobStatus", "LaunchRequest", "Machine"]
