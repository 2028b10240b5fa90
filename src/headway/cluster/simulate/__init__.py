"""The simulator: jobs of a log go through the same decisions as a live cluster's, months of them in seconds."""

from headway.cluster.simulate.compare import compare, find_policies, without_waiting
from headway.cluster.simulate.engine import Away, Setup, simulate
from headway.cluster.simulate.generate import generate
from headway.cluster.simulate.outcome import Outcome, summary
from headway.cluster.simulate.sacct import import_sacct
from headway.cluster.simulate.site import Site, read_away, read_site, read_topology
from headway.cluster.simulate.trace import Trace, read_trace

__all__ = [
    "Away",
    "Outcome",
    "Setup",
    "Site",
    "Trace",
    "compare",
    "find_policies",
    "generate",
    "import_sacct",
    "read_away",
    "read_site",
    "read_topology",
    "read_trace",
    "simulate",
    "summary",
    "without_waiting",
]
