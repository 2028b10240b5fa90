"""GPU clusters shared by many teams: scheduling, simulation, engines and job submission.

scheduler/snapshot.py        the cluster at one instant: nodes, tenants, waiting and running jobs
scheduler/decide.py          one cycle: which jobs start where, which wait, which are preempted
scheduler/policies.py        all policies; least_served.py is Headway's own
scheduler/elastic.py         job sizes that grow and shrink; starvation_guard.py reserves nodes for overdue jobs
scheduler/decision_log.py    record and replay of decisions; wait_reasons.py explains why a job waits
simulate/                    months of a job trace in seconds, decided by the same code
engines/                     what starts processes on machines: the local queue, Slurm, Ray
service/                     the control plane: headway up, its database, its nodes
submit/runs.py               a run as a job of an engine; sweeps.py runs many, sweep_results.py ranks them
submit/code_delivery.py      how code reaches machines: staging.py packs it, provenance.py records its origin

This package imports nothing: submitting a run does not need the scheduler, whose import takes a third of a second.
"""
