"""Two evaluations of the same questions: which model is better, and whether that is significant."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.errors import UsageError
from headway.evals.paired import PairedTest, compare_shares, compare_totals
from headway.evals.results import ScoredRow


@dataclass(frozen=True)
class Comparison:
    """One metric of one task, of two models."""

    task: str
    metric: str
    first: float
    second: float
    questions: int
    """That both have answered."""
    test: PairedTest
    share: bool
    """Whether it is a share of 1, where more is better; of bits per byte, less is."""
    same_prompts: bool

    def document(self, first: str, second: str) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        test = asdict(self.test) | {"significant": self.test.significant}
        return asdict(self) | {"test": test, "sentence": self.sentence(first, second)}

    def sentence(self, first: str, second: str) -> str:
        """Say whether the difference is significant."""
        test = self.test
        p_value = f"p={test.p_value:.2g}" if test.p_value >= 1e-4 else "p<0.0001"
        proof = f"{p_value}, {test.method}, {self.questions:,} questions"
        sides = [(first, self._shown(self.first)), (second, self._shown(self.second))]
        if not test.significant:
            (a, value), (b, other) = sides
            return f"{a} and {b} do not differ significantly at 5 % ({value} and {other}; {proof})."
        if (test.difference > 0) == self.share:
            sides.reverse()
        (better, value), (worse, other) = sides
        return f"{better} is better than {worse}, significant at 5 % ({value} against {other}; {proof})."

    def _shown(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.share else f"{value:.4f}"


def compare_rows(task: str, first: Sequence[ScoredRow], second: Sequence[ScoredRow]) -> list[Comparison]:
    """Compare two models' rows of a task over the questions that both have."""
    left, right = ({row["index"]: row for row in rows} for rows in (first, second))
    common = sorted(left.keys() & right.keys())
    if not common:
        raise UsageError(f"no question of {task} was answered by both", hint="evaluate both with the same --tasks")
    pairs = [(left[index], right[index]) for index in common]
    different = next((a["index"] for a, b in pairs if a["id"] != b["id"]), None)
    if different is not None:
        raise UsageError(
            f"question {different} of {task} is not the same on both sides",
            hint="the data file has changed: evaluate both again",
        )
    same_prompts = all(a["prompt"] == b["prompt"] for a, b in pairs)
    if "logprob" in pairs[0][0] and "logprob" in pairs[0][1]:
        counts = [a["bytes"] for a, _ in pairs]
        nats = [[-row["logprob"] / math.log(2) for row in side] for side in zip(*pairs, strict=True)]
        values = [math.fsum(side) / math.fsum(counts) for side in nats]
        test = compare_totals(nats[0], nats[1], counts)
        return [Comparison(task, "bits_per_byte", values[0], values[1], len(pairs), test, False, same_prompts)]
    comparisons = []
    metrics = [name for name in pairs[0][0].get("scores", ()) if name in pairs[0][1].get("scores", ())]
    if not metrics:
        raise UsageError(f"the sides scored {task} by different metrics", hint="evaluate both again")
    for metric in metrics:
        scores = [[row["scores"][metric] for row in side] for side in zip(*pairs, strict=True)]
        samples = (_samples(pairs[0][0]), _samples(pairs[0][1]))
        means = [math.fsum(side) / len(side) for side in scores]
        test = compare_shares(scores[0], scores[1], samples)
        comparisons.append(Comparison(task, metric, means[0], means[1], len(pairs), test, True, same_prompts))
    return comparisons


def _samples(row: ScoredRow) -> int:
    return len(row.get("outputs", ())) or 1
