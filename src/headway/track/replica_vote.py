"""Which of several replicas is at fault, when they no longer hold the same parameters. Pure.

Of three or more, the one that the others outvote. Of two, a replay tells: one element that differed is looked at again,
and the replica that was farther from what the replay has there was wrong.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["blame_replica", "odd_value", "outvoted_replica"]


def outvoted_replica(digests: Sequence[str], truth: str | None = None) -> int | None:
    """The replica that is not like the others, or not as a replay says; None where that does not tell."""
    if truth is None:
        (common, count), *_ = Counter(digests).most_common(1)
        truth = common if 2 * count > len(digests) else None
    odd = [replica for replica, digest in enumerate(digests) if digest != truth]
    return odd[0] if len(odd) == 1 else None


def odd_value(values: Sequence[float], truth: float) -> int | None:
    """The replica whose value is farthest from what a replay gives; None where two are equally far."""
    far = [abs(value - truth) if math.isfinite(value) else math.inf for value in values]
    odd = [replica for replica, distance in enumerate(far) if distance == max(far)]
    return odd[0] if len(odd) == 1 else None


def blame_replica(errors: Mapping[int, Mapping[str, Any]], doubts: Iterable[Mapping[str, Any]]) -> str | None:
    """A sentence that names the replica, from the errors that workers raised (by rank) and what a replay found."""
    told = {rank: error for rank, error in errors.items() if error.get("tensors") and error.get("values")}
    if not told:
        return None
    first = next(iter(told.values()))
    odd = outvoted_replica(first["digests"])
    for doubt in doubts:
        if odd is None and doubt.get("step") == first["step"]:
            odd = odd_value(first["values"], doubt["value"])
    if odd is None:
        return None
    worker = next(
        (f"worker {rank}" for rank, error in told.items() if error.get("replica") == odd), "one of its workers"
    )
    return (
        f"replica {odd} was at fault: {worker} held another value in {first['tensors'][0]} after step {first['step']}"
    )
