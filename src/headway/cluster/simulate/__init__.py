"""Simulator: runs months of a job trace in seconds through the same `decide` as a live cluster."""

from headway.cluster.simulate.job_trace import JobTrace, read_trace
from headway.cluster.simulate.metrics import SimulationResult, summary
from headway.cluster.simulate.policy_comparison import compare_policies, find_policies, zero_wait_bound
from headway.cluster.simulate.sacct import import_sacct
from headway.cluster.simulate.simulator import MaintenanceWindow, SimulationSetup, simulate, skip_oversized
from headway.cluster.simulate.site import Site, read_away, read_site, read_topology
from headway.cluster.simulate.synthetic import generate_trace

__all__ = [
    "JobTrace",
    "MaintenanceWindow",
    "SimulationResult",
    "SimulationSetup",
    "Site",
    "compare_policies",
    "find_policies",
    "generate_trace",
    "import_sacct",
    "read_away",
    "read_site",
    "read_topology",
    "read_trace",
    "simulate",
    "skip_oversized",
    "summary",
    "zero_wait_bound",
]
