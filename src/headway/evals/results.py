"""What a model answered to scored rows, and rows to metrics with confidence intervals."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from headway.evals.intervals import pass_at_k, ratio_interval, share_interval
from headway.evals.questions import Question
from headway.track.evaluations import EvalMetric

ScoredRow = dict[str, Any]
"""A question with its outputs and scores: a line of --out."""

LIKELIHOOD_UNITS = ("tokens", "words", "bytes")


def score_outputs(
    question: Question, outputs: Sequence[Mapping[str, Any]], metric: str, score: Callable[[str, Sequence[str]], bool]
) -> ScoredRow:
    """Score the outputs of a generation task, each right or wrong."""
    scored = [dict(output) | {"score": int(score(output["text"], question.references))} for output in outputs]
    mean = fmean(output["score"] for output in scored)
    return {"references": list(question.references), "outputs": scored, "scores": {metric: mean}}


def score_choices(question: Question, logprobs: Sequence[float]) -> ScoredRow:
    """Score a multiple-choice question by the log-likelihoods of its choices.

    `acc` takes the likeliest choice, `acc_norm` that per character and `acc_bytes` per byte: the names and rules of
    lm-eval. The first of equal ones counts.
    """
    lengths = {
        "acc": [1] * len(logprobs),
        "acc_norm": [len(choice) for choice in question.choices],
        "acc_bytes": [len(choice.encode()) for choice in question.choices],
    }
    scores = {}
    for name, sizes in lengths.items():
        per_size = [logprob / size for logprob, size in zip(logprobs, sizes, strict=True)]
        scores[name] = float(per_size.index(max(per_size)) == question.gold)
    return {"choices": list(question.choices), "gold": question.gold, "logprobs": list(logprobs), "scores": scores}


def score_text(question: Question, logprob: float, tokens: int) -> ScoredRow:
    """Note a document's log-likelihood, and what it is divided by; words are counted as lm-eval does."""
    words, size = len(re.split(r"\s+", question.prompt)), len(question.prompt.encode())
    return {"logprob": logprob, "tokens": tokens, "words": words, "bytes": size}


def metrics_of(kind: str, rows: Sequence[ScoredRow], samples: int = 1) -> tuple[EvalMetric, ...]:
    """Return the metrics of a task's rows."""
    if not rows:
        return ()
    if kind == "perplexity":
        return tuple(_perplexities(rows))
    names = list(rows[0]["scores"])
    metrics = [_share(name, [row["scores"][name] for row in rows], samples) for name in names]
    if kind == "generate" and samples > 1:
        correct = [sum(output["score"] for output in row["outputs"]) for row in rows]
        for k in _ks(samples):
            metrics.append(_share(f"pass@{k}", [pass_at_k(samples, number, k) for number in correct], samples))
    return tuple(metrics)


def cut_outputs(rows: Sequence[ScoredRow]) -> int:
    """Return how many outputs ended at max_tokens."""
    return sum(output.get("finish") == "length" for row in rows for output in row.get("outputs", ()))


def _share(name: str, means: Sequence[float], samples: int) -> EvalMetric:
    low, high = share_interval(means, samples)
    return EvalMetric(name=name, value=fmean(means), low=low, high=high)


def _ks(samples: int) -> list[int]:
    """Return powers of 2 up to the number of samples, and that number; pass@1 is the mean."""
    return sorted({2**power for power in range(1, 8) if 2**power <= samples} | {samples})


def _perplexities(rows: Sequence[ScoredRow]) -> list[EvalMetric]:
    totals = [-row["logprob"] for row in rows]
    metrics = []
    for unit in LIKELIHOOD_UNITS:
        counts = [row[unit] for row in rows]
        interval = ratio_interval(totals, counts)
        value = math.fsum(totals) / math.fsum(counts)
        metrics.append(_metric(f"{unit[:-1]}_perplexity", value, interval, _exp))
        if unit == "bytes":
            metrics.append(_metric("bits_per_byte", value, interval, lambda nats: nats / math.log(2)))
    return metrics


def _metric(name: str, nats: float, interval: tuple[float, float] | None, unit: Callable[[float], float]) -> EvalMetric:
    low, high = (None, None) if interval is None else (unit(interval[0]), unit(interval[1]))
    return EvalMetric(name=name, value=unit(nats), low=low, high=high, share=False)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
