"""Measured rows of Headway's engine: what the serving model predicts for each, and constants fitted to some of them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.hardware import parse_on
from headway.plan.architecture import Architecture
from headway.plan.costs import make_cost_model
from headway.plan.serving_latency import EngineConstants, PassModel
from headway.plan.serving_passes import Span
from headway.plan.serving_workload import EngineLimits, Request, forecast, prompt_flops

Quantity = Literal["pass_ms", "tokens_s", "prefill_tflops"]

START = EngineConstants(products=0.7, row_kernel_s=3e-6, kernel_s=4e-6, program_bytes_s=5e10)
"""Where fits begin, and what they are drawn to."""
FITTED = ("products", "row_kernel_s", "kernel_s", "program_bytes_s")
"""Constants that are fitted; kernels alone and a profile gave the others."""
SPREAD, NOISE = 0.3, 0.03
"""Standard deviations of the logarithms of constants, a priori, and of measurements."""
SHIFT, ROUNDS = 0.01, 5
AMPLE = 10**9
"""Tokens of a cache that holds every row's sequences."""


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement on one GPU."""

    name: str
    architecture: Architecture
    chip: str
    quantity: Quantity
    measured: float
    fitted: bool
    """Whether constants were fitted to it; else it is a check of them."""
    requests: tuple[Request, ...]
    """Empty for a pass."""
    limits: EngineLimits
    span: Span | None
    """The pass, if it is one."""
    exact: bool

    def predicted(self, constants: EngineConstants) -> float:
        """Return what the serving model says."""
        model = PassModel(
            self.architecture, make_cost_model(parse_on(self.chip)), exact=self.exact, constants=constants
        )
        if self.span is not None:
            return 1e3 * model.seconds(self.span)
        planned = forecast(model, self.requests, self.limits)
        if self.quantity == "prefill_tflops":
            return prompt_flops(model, self.requests) / planned.seconds / 1e12
        return planned.tokens_s

    def error(self, constants: EngineConstants) -> float:
        """Return the prediction's relative error."""
        return self.predicted(constants) / self.measured - 1


def read_rows(path: Path) -> tuple[MeasuredRow, ...]:
    """Read benchmarks/results/serving_rows_h200.json."""
    document = json.loads(path.read_text(encoding="utf-8"))
    models = {name: Architecture(**shape) for name, shape in document["models"].items()}
    chip = document["device"].split()[-1].lower()
    return tuple(
        MeasuredRow(
            name=row["name"],
            architecture=models[row["model"]],
            chip=chip,
            quantity=row["quantity"],
            measured=row["measured"],
            fitted=row["fitted"],
            requests=tuple(map(Request, row.get("prompts", ()), row.get("outputs", ()))),
            limits=EngineLimits(row.get("max_sequences", 0), row.get("max_batch_tokens", 0), AMPLE),
            span=Span(row["sequences"], row["length"] - 1, 1) if row["quantity"] == "pass_ms" else None,
            exact=row.get("exact", False),
        )
        for row in document["rows"]
    )


def fit_constants(rows: Sequence[MeasuredRow]) -> EngineConstants:
    """Return the most likely constants, given the rows that may be used, by Gauss-Newton."""
    used = [row for row in rows if row.fitted]
    start = np.log([getattr(START, name) for name in FITTED])
    point = start.copy()
    for _ in range(ROUNDS):
        errors = _errors(used, point)
        slopes = np.column_stack(
            [(_errors(used, point + shift) - errors) / SHIFT for shift in SHIFT * np.eye(len(point))]
        )
        curvature = slopes.T @ slopes / NOISE**2 + np.eye(len(point)) / SPREAD**2
        gradient = slopes.T @ errors / NOISE**2 + (point - start) / SPREAD**2
        point = point - np.linalg.solve(curvature, gradient)
    return _constants(point)


def rounded(constants: EngineConstants) -> EngineConstants:
    """Return constants with three digits."""
    return EngineConstants(**{name: float(f"{value:.3g}") for name, value in asdict(constants).items()})


def _errors(rows: Sequence[MeasuredRow], point: NDArray[np.float64]) -> NDArray[np.float64]:
    constants = _constants(point)
    return np.array([math.log(row.predicted(constants) / row.measured) for row in rows])


def _constants(point: NDArray[np.float64]) -> EngineConstants:
    return replace(START, **{name: math.exp(value) for name, value in zip(FITTED, point, strict=True)})
