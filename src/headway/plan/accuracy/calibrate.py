"""Fits the cost model's parameters to runs that were measured, moving each from its prior only as far as the runs ask.

A Gauss-Newton search for the most likely parameters: errors are relative, a few wild runs count little, and every
parameter has a prior. What is left over is often alike for runs of like layers, so a calibration also learns by how
much runs near those it saw are off, and corrects its neighbours by that.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from headway.plan.accuracy.published_runs import PublishedRun
from headway.plan.costs import CostModel
from headway.plan.efficiencies import SPREAD, Efficiencies
from headway.plan.rates import ModelRates, generation
from headway.plan.settings import LOW
from headway.plan.step import step

__all__ = ["Calibration", "as_json", "calibrate", "fit", "predict"]

Array = NDArray[np.float64]

NAMES = tuple(item.name for item in fields(Efficiencies))
_SHARES = [NAMES.index(name) for name in ("near", "far", "hidden")]
"""Shares of something: never more than all of it."""
NOISE = 0.06
"""Relative error of a run that the model describes: what runs differ by when they are repeated elsewhere."""
STEP = 0.02
"""Of the logarithm of a parameter, for its derivative."""

_RATES: dict[tuple[object, ...], ModelRates] = {}


def _costs(case: PublishedRun, parameters: Efficiencies) -> CostModel:
    """Costs of a case; kernels' modelled times are shared by all cases on a chip, whatever the parameters."""
    chip = case.cluster.chip
    key = (chip.name, chip.memory_bytes, chip.bandwidth_bytes_s)
    return CostModel(case.cluster, _RATES.setdefault(key, ModelRates(chip)), parameters, generation(chip).demand)


def predict(case: PublishedRun, parameters: Efficiencies) -> float:
    """Tokens a second and device."""
    seconds = step(case.architecture, case.settings, _costs(case, parameters)).seconds
    return case.settings.batch * case.settings.seq / seconds / case.settings.mesh.devices


def fit(
    cases: Sequence[PublishedRun], prior: Efficiencies, weights: Sequence[float] | None = None, rounds: int = 6
) -> Efficiencies:
    """The most likely parameters, given the prior and what the cases measured."""
    spread = np.array([SPREAD[name] for name in NAMES])
    start = np.log([getattr(prior, name) for name in NAMES])
    weight = np.ones(len(cases)) if weights is None else np.asarray(weights, dtype=float)
    point = start.copy()
    for _ in range(rounds):
        errors = _errors(cases, point)
        slopes = np.empty((len(cases), len(NAMES)))
        for k in range(len(NAMES)):
            shifted = point.copy()
            shifted[k] += STEP
            slopes[:, k] = (_errors(cases, shifted) - errors) / STEP
        # a run that is off by many times the noise tells of something else than these parameters
        trust = weight / NOISE**2 / (1 + (errors / (2.5 * NOISE)) ** 2)
        curvature = slopes.T @ (slopes * trust[:, None]) + np.diag(spread**-2)
        gradient = slopes.T @ (trust * errors) + (point - start) / spread**2
        point = np.clip(point - np.linalg.solve(curvature, gradient), start - 3 * spread, start + 3 * spread)
        point[_SHARES] = np.minimum(point[_SHARES], 0.0)
    return _parameters(point)


def _parameters(point: Array) -> Efficiencies:
    return Efficiencies(**{name: float(math.exp(value)) for name, value in zip(NAMES, point, strict=True)})


def _errors(cases: Sequence[PublishedRun], point: Array) -> Array:
    parameters = _parameters(point)
    return np.array([math.log(predict(case, parameters) / case.tokens_s) for case in cases])


# -- what neighbours have in common

LIKE = {
    "tensor": 0.7,
    "dim": 0.8,
    "microbatch": 0.8,
    "seq": 0.8,
    "layers": 2.5,
    "pipeline": 3.0,
    "data": 3.0,
    "microbatches": 4.0,
}
"""By how many doublings two runs may differ and still err alike. What shapes a layer's kernels counts most."""
OFF_BY = 0.15
"""How far runs of one kind are typically off beyond what the parameters can explain."""
REPEATS = 0.03
"""How far two equal runs differ."""


@dataclass(frozen=True)
class Calibration:
    """Parameters, and what the runs they were fitted to were still off by."""

    parameters: Efficiencies
    features: Array
    weights: Array

    def predict(self, case: PublishedRun) -> float:
        """Tokens a second and device, corrected by what neighbours were off by."""
        plain = predict(case, self.parameters)
        if not len(self.features):
            return plain
        return plain * math.exp(-float(_similarity(_features(case)[None], self.features)[0] @ self.weights))


def calibrate(cases: Sequence[PublishedRun], prior: Efficiencies) -> Calibration:
    """Refit the parameters to a few runs, and learn what they are still off by."""
    parameters = fit(cases, prior)
    features = np.array([_features(case) for case in cases])
    errors = np.array([math.log(predict(case, parameters) / case.tokens_s) for case in cases])
    kernel = _similarity(features, features) + REPEATS**2 * np.eye(len(cases))
    return Calibration(parameters, features, np.linalg.solve(kernel, errors))


def _features(case: PublishedRun) -> Array:
    """A run as a point: doublings of its sizes, each over how many of them still are alike."""
    settings, mesh = case.settings, case.settings.mesh
    sizes = {
        "tensor": mesh.tensor, "dim": case.architecture.dim, "microbatch": settings.microbatch, "seq": settings.seq,
        "layers": case.architecture.layers, "pipeline": mesh.pipeline, "data": mesh.data,
        "microbatches": settings.microbatches,
    }  # fmt: skip
    point = [math.log2(size) / LIKE[name] for name, size in sizes.items()]
    kind = [
        3.0 * (settings.recompute != "none"),
        3.0 * (settings.precision in LOW),
        3.0 * (not case.dense),
        _chip_feature(case.chip),
    ]
    return np.array(point + kind)


def _chip_feature(name: str) -> float:
    """A place for each chip, far from all others."""
    return 10.0 * sum(ord(letter) * (i + 1) for i, letter in enumerate(name))


def _similarity(first: Array, second: Array) -> Array:
    distances = ((first[:, None] - second[None]) ** 2).sum(-1)
    return np.asarray(OFF_BY**2 * np.exp(-0.5 * distances))


def as_json(parameters: Efficiencies) -> dict[str, float]:
    """Rounded to what matters."""
    return {name: float(f"{value:.4g}") for name, value in asdict(parameters).items()}
