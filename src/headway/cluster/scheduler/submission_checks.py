"""Which requests can never run on a cluster, however long they wait, and the nearest that could."""

import math
from collections.abc import Container

from headway.cluster.scheduler.jobs import KINDS, Job, check_sizes
from headway.cluster.scheduler.nodes import NodeTable
from headway.cluster.scheduler.tenants import TenantTable
from headway.errors import UsageError, plural


class OversizedJobError(UsageError):
    """A job requests more GPUs than it can ever have here."""


def check_request(job: Job, nodes: NodeTable, tenants: TenantTable, submitted: Container[str]) -> None:
    """Raise UsageError for an invalid request, or the name of a job that was submitted."""
    least = 0 if job.cpus > 0 else 1
    if not math.isfinite(job.gpus) or job.gpus != int(job.gpus) or job.gpus < least:
        raise UsageError(f"job {job.name} requests {plural(job.gpus, 'GPU')}", hint=f"a whole number, at least {least}")
    if job.tenant not in tenants.rows:
        known = ", ".join(tenants.names) or "none"
        raise UsageError(f"job {job.name}: unknown tenant '{job.tenant}'", hint=f"known tenants: {known}")
    if job.name in submitted:
        raise UsageError(f"duplicate job '{job.name}'")
    if job.within is not None and job.within not in nodes.levels:
        levels = ", ".join(nodes.levels) or "none"
        raise UsageError(f"job {job.name}: unknown network level '{job.within}'", hint=f"known levels: {levels}")
    if job.kind not in KINDS:
        raise UsageError(f"job {job.name}: unknown kind '{job.kind}'", hint=f"one of {', '.join(KINDS)}")
    for key, valid, hint in (
        ("submit_s", math.isfinite(job.submit_s), "finite seconds"),
        ("limit_s", job.limit_s > 0, "seconds, more than 0"),
        ("save_every_s", job.save_every_s > 0, "seconds, more than 0"),
        ("min_run_s", 0 <= job.min_run_s < math.inf, "finite seconds, at least 0"),
        ("restart_s", 0 <= job.restart_s < math.inf, "finite seconds, at least 0"),
        ("deadline_s", job.deadline_s > job.submit_s, f"seconds, after its submit_s of {job.submit_s}"),
        ("cpus", 0 <= job.cpus < math.inf, "a number, at least 0"),
        ("memory_bytes", 0 <= job.memory_bytes < math.inf, "a number, at least 0"),
        ("machines", job.machines >= 0 and not job.gpus % max(job.machines, 1), "a divisor of its GPUs"),
    ):
        if not valid:
            raise UsageError(f"job {job.name}: {key} is {getattr(job, key)}", hint=hint)
    if job.sizes:
        check_sizes(job)


def check_size(job: Job, nodes: NodeTable, level: int, allowed: int) -> None:
    """Raise OversizedJobError for more than the nodes within one domain of a level have, or a tenant is `allowed`."""
    largest = nodes.largest_gang(level)
    if job.gpus > min(largest, allowed):
        where = f" within one {job.within}" if job.within else ""
        limit = f"the largest gang is {largest}" if largest <= allowed else f"{job.tenant} may use {allowed}"
        raise OversizedJobError(
            f"job {job.name} requests {plural(job.gpus, 'GPU')}{where}; {limit}",
            hint=f"at most {min(largest, allowed)}",
        )
    if job.machines or job.cpus or job.memory_bytes:
        _check_shape(job, nodes)


def _check_shape(job: Job, nodes: NodeTable) -> None:
    """Raise OversizedJobError for a job whose nodes would need more than any, or more nodes, than there are."""
    machines, shapes = max(job.machines, 1), nodes.shapes()
    each = job.gpus // machines if job.machines else min(job.gpus, 1)
    for what, asked, has in (
        ("GPUs per machine", each, shapes.gpus),
        ("CPUs", job.cpus, shapes.cpus),
        ("GiB of memory", job.memory_bytes / 2**30, shapes.memory_bytes / 2**30),
    ):
        most = float(has.max(initial=0))
        if asked > most:
            most = math.floor(10 * most) / 10  # a request for what is named here must not be refused
            raise OversizedJobError(
                f"job {job.name} requests {asked:g} {what}; the largest node has {most:g}", hint=f"at most {most:g}"
            )
    able = (shapes.gpus >= each) & (shapes.cpus >= job.cpus) & (shapes.memory_bytes >= job.memory_bytes)
    count, gpus = int(shapes.nodes[able].sum()), int((shapes.nodes * shapes.gpus)[able].sum())
    if count < machines or gpus < job.gpus:
        what = plural(machines, "machine") if job.machines else plural(job.gpus, "GPU")
        raise OversizedJobError(
            f"job {job.name} requests {what}; {count} machines with {gpus} GPUs are large enough",
            hint=f"at most {count if job.machines else gpus}",
        )
