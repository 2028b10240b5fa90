"""One pool of GPUs for many: tenants, queues, what is decided and why, and a simulator that runs the same code.

cluster/scheduler/snapshot.py      the cluster at one instant: nodes, tenants, jobs that wait or run
cluster/scheduler/decide.py        one cycle: who starts where, who waits, who yields
cluster/scheduler/elastic.py       sizes that grow and shrink; cluster/scheduler/starvation_guard.py holds nodes for who has waited far too long
cluster/scheduler/policies.py      all policies, Headway's own (cluster/scheduler/least_served.py) first
cluster/scheduler/decision_log.py        what was decided, kept so that it can be decided again; cluster/scheduler/wait_reasons.py answers for one job
simulate/        months of a log in seconds
engines/         what starts processes on machines: this one's own queue, Slurm, Ray
cluster/submit/runs.py        a run as a job of an engine; cluster/submit/sweeps.py many of them, cluster/submit/sweep_results.py what came of those
cluster/submit/code_delivery.py          how code gets to machines: cluster/submit/staging.py packs it, cluster/submit/provenance.py says where it came from

Nothing is imported from here: whoever submits a run needs none of what decides, which is a third of a second away.
"""
