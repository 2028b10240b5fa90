"""What a caller is told of jobs that are not its tenants': no names, no counts, no reasons. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.cluster.scheduler.decisions import Reason, ReasonCode

OTHER_JOB = "a job of another tenant"
OTHERS = "other tenants"
_EXPLAINED = ("job", "state", "instead", "start", "policy")
"""What an explanation says of the job itself."""


def own_explanation(why: Mapping[str, Any], tenants: Collection[str], jobs: Collection[str]) -> dict[str, Any]:
    """An explanation by the scheduler, for a caller who may see some tenants and these jobs.

    What is not known to be harmless is left out. How many GPUs others hold in all is told, since free GPUs are, too.
    """
    reason = own_reason(Reason(ReasonCode(why["reason"]["code"]), _pairs(why["reason"]["numbers"])), jobs)
    own = [holder for holder in why["holders"] if holder["tenant"] in tenants]
    rest = sum(holder["gpus"] for holder in why["holders"] if holder["tenant"] not in tenants)
    others = [{"tenant": OTHERS, "gpus": rest, "jobs": None, "guarantee": None}] if rest else []
    return {key: why[key] for key in _EXPLAINED if key in why} | {
        "reason": {"code": reason.code.value, "numbers": [list(pair) for pair in reason.numbers]},
        "sentence": reason.sentence,
        "holders": own + others,
    }


def own_reason(reason: Reason, jobs: Collection[str] = ()) -> Reason:
    """A reason that names no job but these, and counts none."""
    hidden = {key: OTHER_JOB for key, value in reason.numbers if key == "head" and value not in jobs}
    hidden |= {"count": "other"}  # "starts by preempting other jobs"
    return Reason(reason.code, tuple((key, hidden.get(key, value)) for key, value in reason.numbers))


def own_node(node: Mapping[str, Any], jobs: Collection[str]) -> dict[str, Any]:
    """A node with these jobs only."""
    return {**node, "jobs": [job for job in node["jobs"] if job in jobs]}


def _pairs(numbers: Any) -> tuple[tuple[str, float | int | str], ...]:
    return tuple((key, value) for key, value in numbers)
