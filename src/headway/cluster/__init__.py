"""One pool of GPUs for many: tenants, queues, what is decided and why, and a simulator that runs the same code.

snapshot.py      the cluster at one instant: nodes, tenants, jobs that wait or run
decide.py        one cycle: who starts where, who waits, who yields
elastic.py       sizes that grow and shrink; keeping.py holds nodes for who has waited far too long
policies.py      all policies, Headway's own (least_served.py) first
record.py        what was decided, kept so that it can be decided again; why.py answers for one job
simulate/        months of a log in seconds
engines/         what starts processes on machines: this one's own queue, Slurm, Ray
submit.py        a run as a job of an engine; sweeps.py many of them, results.py what came of those
code.py          how code gets to machines: staging.py packs it, origin.py says where it came from

Nothing is imported from here: whoever submits a run needs none of what decides, which is a third of a second away.
"""
