"""Tables of `headway plan --sweep`: the best plan of each number of nodes."""

from collections.abc import Iterator, Sequence

from headway.cli.plan_text import cells_of, money, percent, span, step_time, token_rate, wrapped
from headway.cli.plan_view import describe_settings, describe_work
from headway.cli.text import columns, count
from headway.plan.plan import Plan
from headway.plan.scaling import ScalingPoint, efficiency

SWEEP = {
    "nodes": 7, "devices": 9, "step": 9, "tokens/s": 12, "scaling": 9, "MFU": 6, "run": 9, "device-h": 10, "cost": 9,
}  # fmt: skip
"""Columns of a sweep, and how wide each is."""


def sweep_lines(points: Sequence[ScalingPoint], command: str) -> list[str]:
    """Return two lines per number of nodes: figures; then the plan and, if it fits, a bar of its efficiency."""
    plans = [point.plan for point in points if point.plan is not None]
    priced = any(plan.run.cost is not None for plan in plans)
    heads = _sweep_heads(priced)
    lines = [cells_of(heads, [SWEEP[head] for head in heads])]
    if plans:
        cluster = plans[0].cluster
        title = f"{describe_work(plans[0])}, nodes~of~{cluster.per_node}~x~{cluster.chip.name.upper()}"
        lines = [*wrapped(title), "", *lines]
    for point in points:
        lines += _sweep_point(points, point, heads)
    barred = any(_has_bar(_sweep_text(plan)) for plan in plans)
    bars = "; bars: share of the best" * barred
    lines += ["", *wrapped(f"scaling: tokens/s per device relative to the first line{bars}")]
    return [*lines, *wrapped(f"next: {command} for the details of one", 6)]


def _sweep_heads(priced: bool) -> list[str]:
    """Return the columns of a sweep that fit the terminal."""
    heads = [head for head in SWEEP if priced or head != "cost"]
    for narrow in ("devices", "device-h", "MFU"):
        if sum(SWEEP[head] for head in heads) > columns():
            heads.remove(narrow)
    return heads


def _sweep_text(plan: Plan) -> str:
    settings = plan.best.estimate.settings
    return f"{'':7}  {settings.mesh.describe()}, {describe_settings(settings, short=True)}"


def _has_bar(text: str) -> bool:
    """Whether a plan's text leaves room for a bar."""
    return len(text) <= columns() - 13


def _sweep_point(points: Sequence[ScalingPoint], point: ScalingPoint, heads: Sequence[str]) -> Iterator[str]:
    share = efficiency(points, point)
    if point.plan is None or share is None:
        sizes = cells_of([f"{point.nodes:,}", f"{point.devices:,}"], [SWEEP["nodes"], SWEEP["devices"]])
        yield from wrapped(f"{sizes}   {point.reason}", len(sizes) + 3)
        return
    best, run = point.plan.best.estimate, point.plan.run
    cells = {
        "nodes": f"{point.nodes:,}",
        "devices": f"{point.devices:,}",
        "step": step_time(best.step.seconds),
        "tokens/s": token_rate(best.tokens_s),
        "scaling": percent(share),
        "MFU": percent(best.mfu),
        "run": span(run.seconds),
        "device-h": count(run.device_hours),
        "cost": money(run.cost),
    }
    yield cells_of([cells[head] for head in heads], [SWEEP[head] for head in heads])
    text = _sweep_text(point.plan)
    if _has_bar(text):
        most = max(efficiency(points, other) or 0.0 for other in points)
        yield f"{text:<{columns() - 12}}|{'#' * round(share / most * 10):<10}|"
    else:
        yield from wrapped(text, 9)
