"""What float8 layers observed: recorded once in a while, with an alarm where codes lose numbers. Pure, but for reading.

A scale follows the numbers of each pass, so that nothing saturates; small numbers beside a large one become zero. A
layer whose gradients mostly do so learns from the rest alone: it is better left in bfloat16 (`train.fp8.skip`), or cast
by rows.
"""

import logging
import math
from collections.abc import Mapping, Sequence

from headway.models.fp8 import Float8Model
from headway.models.fp8_linear import OBSERVED
from headway.track import Recorder

EVERY_STEPS = 100
"""Reading waits for the device; a hundred steps make that nothing."""
MOST_OVER = 0.01
"""Share of numbers that do not fit: only what is not finite."""
Observed = Mapping[str, Mapping[str, float]]
"""By layer, means over the passes of a step by the names of `OBSERVED`."""


def is_due(step: int) -> bool:
    """Whether a step's observations are recorded."""
    return step == 1 or step % EVERY_STEPS == 0


def read_observed(float8: Float8Model) -> Observed:
    """Return the means of layers that saw anything in this step."""
    rows: Sequence[Sequence[float]] = float8.observed().tolist()
    by_layer = {
        group.name: dict(zip(OBSERVED, row, strict=True)) for group, row in zip(float8.groups, rows, strict=True)
    }
    return {
        name: {key: value / sums["passes"] for key, value in sums.items() if key != "passes"}
        for name, sums in by_layer.items()
        if sums["passes"]
    }


def worst(observed: Observed) -> dict[str, float]:
    """Return the largest of each share over all layers, as metrics of the step; NaN if one is."""
    shares = ("input_underflow", "gradient_underflow", "input_overflow", "gradient_overflow")
    by_share = {key: [layer[key] for layer in observed.values()] for key in shares} if observed else {}
    return {f"fp8/{key}": math.nan if any(map(math.isnan, of)) else max(of) for key, of in by_share.items()}


def alarms(observed: Observed, most_zero: float, step: int) -> list[str]:
    """Return a sentence for each layer whose codes lose more than they may."""
    sentences = []
    for name, layer in observed.items():
        for kind in ("input", "gradient"):
            zero, over, amax = (layer[f"{kind}_{key}"] for key in ("underflow", "overflow", "amax"))
            if zero > most_zero:
                sentences.append(
                    f"fp8: at step {step} {zero:.0%} of the {kind}s of {name} become zero (largest {amax:.3g}); "
                    f'train.fp8.skip = ["{_pattern(name)}"] keeps it in bfloat16'
                )
            if not over <= MOST_OVER:
                sentences.append(
                    f"fp8: at step {step} {over:.0%} of the {kind}s of {name} do not fit (largest {amax:.3g})"
                )
    return sentences


def _pattern(name: str) -> str:
    """Return a pattern of a product's layers: layers.0.attention.* of layers.0.attention.q+k+v."""
    return f"{name.rpartition('.')[0]}.*" if "+" in name else name


def record_observed(recorder: Recorder, float8: Float8Model, most_zero: float, step: int) -> dict[str, float]:
    """Record what each layer observed, and alarms; return the worst shares as metrics."""
    observed = read_observed(float8)
    recorder.event("fp8", step=step, layers={name: dict(layer) for name, layer in observed.items()})
    for sentence in alarms(observed, most_zero, step):
        logging.getLogger(__name__).warning(sentence)
        recorder.event("log", message=sentence)
    return worst(observed)
