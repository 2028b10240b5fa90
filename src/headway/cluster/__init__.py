"""One pool of GPUs for many: tenants, queues, what is decided and why, and a simulator that runs the same code.

snapshot.py      the cluster at one instant: nodes, tenants, jobs that wait or run
decide.py        one cycle: who starts where, who waits, who yields
elastic.py       sizes that grow and shrink; keeping.py holds nodes for who has waited far too long
policies.py      all policies, Headway's own (least_served.py) first
record.py        what was decided, kept so that it can be decided again; why.py answers for one job
simulate/        months of a log in seconds
"""

from headway.cluster.decide import decide
from headway.cluster.decisions import Code, Decision, Reason
from headway.cluster.jobs import Job
from headway.cluster.policies import POLICIES
from headway.cluster.policy import Policy
from headway.cluster.record import Recorder, carry_out, replay
from headway.cluster.room import Placement
from headway.cluster.snapshot import Snapshot
from headway.cluster.why import Why, why

__all__ = [
    "POLICIES",
    "Code",
    "Decision",
    "Job",
    "Placement",
    "Policy",
    "Reason",
    "Recorder",
    "Snapshot",
    "Why",
    "carry_out",
    "decide",
    "replay",
    "why",
]
