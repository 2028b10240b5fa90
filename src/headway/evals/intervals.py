"""How sure a score is: confidence intervals of shares and perplexities, and the pass@k estimator.

Outputs of one question are not independent, so questions are what is counted (clusters), not outputs. The variance of
a mean is that of the questions' own means. A share is near 0 or 1 often enough that mean +- 1.96 errors would leave
the range; Wilson's interval does not. So both: Wilson's interval of the effective number of outputs, the number that
would have the observed variance if all were independent, from the number of questions (outputs of a question always
agree) up to that of outputs. With one output per question this is Wilson's interval itself.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

Z = NormalDist().inv_cdf(0.975)
"""Of a 95 % interval."""


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `count` independent trials."""
    if count <= 0:
        return 0.0, 1.0
    shrunk = share + Z * Z / (2 * count)
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    low, high = (shrunk - spread) / scale, (shrunk + spread) / scale
    # At 0 and 1 rounding would leave the bound a little inside.
    return 0.0 if share <= 0 else max(low, 0.0), 1.0 if share >= 1 else min(high, 1.0)


def share_interval(means: Sequence[float], samples: int = 1) -> tuple[float, float]:
    """Return the 95 % interval of the mean of the questions' means, each of `samples` outputs scored from 0 to 1."""
    questions, share = len(means), min(max(fmean(means), 0.0), 1.0)
    variance = clustered_variance(means)
    # Without any variance at 0 or 1, nothing tells how much outputs of a question agree: assume that they always do.
    certain = share in (0.0, 1.0)
    effective = questions if certain else math.inf if variance <= 0 else share * (1 - share) / variance
    return wilson(share, min(max(effective, questions), questions * samples))


def clustered_variance(means: Sequence[float]) -> float:
    """Return the variance of the mean of the questions' means; infinite for one question."""
    if len(means) < 2:
        return math.inf
    center = fmean(means)
    return math.fsum((value - center) ** 2 for value in means) / (len(means) - 1) / len(means)


def ratio_interval(totals: Sequence[float], counts: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of sum(totals) / sum(counts) over documents; None for fewer than two.

    The linearized variance of a ratio, with documents as clusters: tokens of a document are not independent.
    """
    if len(totals) < 2:
        return None
    whole = math.fsum(counts)
    ratio = math.fsum(totals) / whole
    squares = math.fsum((total - ratio * count) ** 2 for total, count in zip(totals, counts, strict=True))
    error = math.sqrt(squares * len(totals) / (len(totals) - 1)) / whole
    return ratio - Z * error, ratio + Z * error


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k outputs is correct, from `samples` of which some were.

    1 - C(samples - correct, k) / C(samples, k), as in the paper of HumanEval.
    """
    assert 0 <= correct <= samples
    assert 1 <= k <= samples
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
