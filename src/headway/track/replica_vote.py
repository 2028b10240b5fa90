"""Which replica is corrupted, when replicas no longer hold the same parameters. Pure.

Of three or more, the one that the others outvote. Of two, a replay decides: one differing element is compared with the
replayed value, and the replica farther from it was wrong.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def outvoted_replica(digests: Sequence[str], truth: str | None = None) -> int | None:
    """Return the replica that differs from the majority, or from a replay's digest; None if that is ambiguous."""
    if truth is None:
        (common, count), *_ = Counter(digests).most_common(1)
        truth = common if 2 * count > len(digests) else None
    outvoted = [replica for replica, digest in enumerate(digests) if digest != truth]
    return outvoted[0] if len(outvoted) == 1 else None


def odd_value(values: Sequence[float], truth: float) -> int | None:
    """Return the replica whose value is farthest from a replay's; None if two are equally far."""
    distances = [abs(value - truth) if math.isfinite(value) else math.inf for value in values]
    odd = [replica for replica, distance in enumerate(distances) if distance == max(distances)]
    return odd[0] if len(odd) == 1 else None


def blame_replica(errors: Mapping[int, Mapping[str, Any]], doubts: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence that names the replica, from the workers' errors (by rank) and a replay's `doubt` events."""
    informative = {rank: error for rank, error in errors.items() if error.get("tensors") and error.get("values")}
    if not informative:
        return None
    first = next(iter(informative.values()))
    odd = outvoted_replica(first["digests"])
    for doubt in doubts:
        if odd is None and doubt.get("step") == first["step"]:
            odd = odd_value(first["values"], doubt["value"])
    if odd is None:
        return None
    worker = next(
        (f"worker {rank}" for rank, error in informative.items() if error.get("replica") == odd), "one of its workers"
    )
    return (
        f"replica {odd} was at fault: {worker} held another value in {first['tensors'][0]} after step {first['step']}"
    )
