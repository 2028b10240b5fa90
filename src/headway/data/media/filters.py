"""Leave out clips by what they look like: blur, lack of motion, near-duplicates, and scorers of the user's own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headway.data.media.appearance import Appearance, hash_distance
from headway.errors import DataError
from headway.recipe.own_code import describe_error, load_name


@dataclass(frozen=True)
class MediaFilters:
    """What is left out; None leaves out nothing."""

    min_sharpness: float | None = None
    """Least variance of the Laplacian."""
    min_motion: float | None = None
    """Least change of gray levels between frames."""
    near_duplicates: int | None = None
    """Clips whose hashes differ in at most so many of 64 bits are the same; the first by name is kept."""
    scorer: str | None = None
    """`package.module:name`: called with a file's path, its score must be at least `min_score`."""
    min_score: float = 0.0

    def __post_init__(self) -> None:
        if self.near_duplicates is not None and not 0 <= self.near_duplicates <= 16:
            raise DataError(f"near_duplicates is {self.near_duplicates}", hint="use 0 to 16 of 64 bits")


def filtered(filters: MediaFilters, clips: Sequence[tuple[str, str, Appearance]]) -> dict[str, tuple[str, str]]:
    """Return (filter, reason) of each clip that is left out, of clips as (name, path, appearance).

    A clip is left out by the first filter that it does not pass; only those that pass are compared with each other.
    """
    removed: dict[str, tuple[str, str]] = {}
    for name, _, seen in clips:
        if filters.min_sharpness is not None and seen.sharpness < filters.min_sharpness:
            removed[name] = ("blur", f"its sharpness is {seen.sharpness:g}, below {filters.min_sharpness:g}")
        elif filters.min_motion is not None and seen.motion < filters.min_motion:
            removed[name] = ("motion", f"its motion is {seen.motion:g}, below {filters.min_motion:g}")
    left = [clip for clip in clips if clip[0] not in removed]
    if filters.near_duplicates is not None:
        for name, other in near_duplicates({name: seen.hash for name, _, seen in left}, filters.near_duplicates):
            removed[name] = ("near-duplicates", f"it looks like {other}")
    if filters.scorer is not None:
        score = _scorer(filters.scorer)
        for name, path, _ in left:
            if name not in removed and (value := score(path)) < filters.min_score:
                removed[name] = ("scorer", f"its score is {value:g}, below {filters.min_score:g}")
    return removed


def near_duplicates(hashes: Mapping[str, str], most: int) -> Iterator[tuple[str, str]]:
    """Yield (clip, earlier clip that it looks like), in order; an earlier clip is one that is kept.

    Hashes that differ in at most `most` bits agree in at least one of most + 1 groups of bits, so only clips that share
    a group are compared.
    """
    edges = [64 * group // (most + 1) for group in range(most + 2)]
    kept: dict[tuple[int, int], list[str]] = {}
    for name, value in hashes.items():
        bits = int(value, 16)
        groups = [(number, bits >> low & (1 << high - low) - 1) for number, (low, high) in enumerate(pairwise(edges))]
        candidates = dict.fromkeys(other for group in groups for other in kept.get(group, ()))
        same = next((other for other in candidates if hash_distance(value, hashes[other]) <= most), None)
        if same is not None:
            yield name, same
            continue
        for group in groups:
            kept.setdefault(group, []).append(name)


def _scorer(spec: str) -> Callable[[str], float]:
    """Return the user's scorer, whose errors are one sentence."""
    function: Any = load_name(spec, "--scorer", callable)

    def score(path: str) -> float:
        try:
            value = function(path)
            return float(value)
        except Exception as error:  # the user's code may raise anything
            raise DataError(f"{spec} failed on {path}: {describe_error(error)}") from error

    return score
