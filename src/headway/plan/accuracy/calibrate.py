"""Fits the cost model's parameters to measured runs: maximum a posteriori by Gauss-Newton.

Errors are relative, outliers are down-weighted, and every parameter has a prior. Residuals are similar for runs with
similar layers, so a calibration also corrects predictions by the residuals of neighbouring runs (a Gaussian process).
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

Array = NDArray[np.float64]

NAMES = tuple(item.name for item in fields(Efficiencies))
_SHARES = [NAMES.index(name) for name in ("near", "far", "hidden")]
"""Parameters that are at most 1."""
NOISE = 0.06
"""Relative error of a well-modelled run: the difference between runs repeated elsewhere."""
STEP = 0.02
"""Finite difference of a parameter's logarithm."""

_RATES: dict[tuple[object, ...], ModelRates] = {}


def _costs(case: PublishedRun, parameters: Efficiencies) -> CostModel:
    """Cost model of a case; kernel times are cached per chip, independent of the parameters."""
    chip = case.cluster.chip
    key = (chip.name, chip.memory_bytes, chip.bandwidth_bytes_s)
    return CostModel(case.cluster, _RATES.setdefault(key, ModelRates(chip)), parameters, generation(chip).demand)


def predict(case: PublishedRun, parameters: Efficiencies) -> float:
    """Predicted tokens per second and device."""
    seconds = step(case.architecture, case.settings, _costs(case, parameters)).seconds
    return case.settings.batch * case.settings.seq / seconds / case.settings.mesh.devices


def fit(
    cases: Sequence[PublishedRun], prior: Efficiencies, weights: Sequence[float] | None = None, rounds: int = 6
) -> Efficiencies:
    """The most likely parameters, given the prior and the measured cases."""
    spread = np.array([SPREAD[name] for name in NAMES])
    start = np.log([getattr(prior, name) for name in NAMES])
    weight = np.ones(len(cases)) if weights is None else np.asarray(weights, dtype=float)
    point = start.copy()
    for _ in range(rounds):
        errors = _errors(cases, _parameters(point))
        slopes = np.empty((len(cases), len(NAMES)))
        for k in range(len(NAMES)):
            shifted = point.copy()
            shifted[k] += STEP
            slopes[:, k] = (_errors(cases, _parameters(shifted)) - errors) / STEP
        # a run that is off by many times the noise is not explained by these parameters
        trust = weight / NOISE**2 / (1 + (errors / (2.5 * NOISE)) ** 2)
        curvature = slopes.T @ (slopes * trust[:, None]) + np.diag(spread**-2)
        gradient = slopes.T @ (trust * errors) + (point - start) / spread**2
        point = np.clip(point - np.linalg.solve(curvature, gradient), start - 3 * spread, start + 3 * spread)
        point[_SHARES] = np.minimum(point[_SHARES], 0.0)
    return _parameters(point)


def _parameters(point: Array) -> Efficiencies:
    return Efficiencies(**{name: float(math.exp(value)) for name, value in zip(NAMES, point, strict=True)})


def _errors(cases: Sequence[PublishedRun], parameters: Efficiencies) -> Array:
    return np.array([math.log(predict(case, parameters) / case.tokens_s) for case in cases])


# -- residuals of neighbouring runs

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
"""Length scales in doublings: runs this close have similar errors. What shapes a layer's kernels counts most."""
OFF_BY = 0.15
"""Typical error of similar runs that the parameters do not explain."""
REPEATS = 0.03
"""Relative difference of two equal runs."""


@dataclass(frozen=True)
class Calibration:
    """Fitted parameters, and the residuals of their runs."""

    parameters: Efficiencies
    features: Array
    weights: Array

    def predict(self, case: PublishedRun) -> float:
        """Predicted tokens per second and device, corrected by the residuals of neighbours."""
        plain = predict(case, self.parameters)
        if not len(self.features):
            return plain
        return plain * math.exp(-float(_similarity(_features(case)[None], self.features)[0] @ self.weights))


def calibrate(cases: Sequence[PublishedRun], prior: Efficiencies) -> Calibration:
    """Refit the parameters to a few runs, and model their residuals."""
    parameters = fit(cases, prior)
    features = np.array([_features(case) for case in cases])
    kernel = _similarity(features, features) + REPEATS**2 * np.eye(len(cases))
    return Calibration(
        parameters, features, np.asarray(np.linalg.solve(kernel, _errors(cases, parameters)), dtype=np.float64)
    )


def _features(case: PublishedRun) -> Array:
    """Features of a run: logarithms of its sizes over their length scales."""
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
        10.0 * sum(ord(letter) * i for i, letter in enumerate(case.chip, 1)),  # far from all other chips
    ]
    return np.array(point + kind)


def _similarity(first: Array, second: Array) -> Array:
    distances = ((first[:, None] - second[None]) ** 2).sum(-1)
    return np.asarray(OFF_BY**2 * np.exp(-0.5 * distances))


def as_json(parameters: Efficiencies) -> dict[str, float]:
    """Parameters rounded to four digits."""
    return {name: float(f"{value:.4g}") for name, value in asdict(parameters).items()}
